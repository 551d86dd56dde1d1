"""The functions that the ranks of `rank_pool` run in the tests of communication hooks: one training, several ways."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import ddp_models
import torch
from ddp_ranks import descend, difference, scenario, world
from torch import nn

from rpcdist import collectives
from rpcdist.parallel import DistributedDataParallel, MixedPrecision, comm_hooks

STEPS = 6
START = 3  # PowerSGD's first iteration
TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(module for _ in range(4) for module in (nn.Linear(48, 48), nn.Tanh())), nn.Linear(48, 3))


def hook_of_torch(name: str, group: Any, wrappers: Any = None) -> tuple[Any, Any]:
    """State and function of a hook, as a script for torch makes them; `wrappers` is the module of the wrapper."""
    if name == "powerSGD_hook":
        module = importlib.import_module(f"{TORCH_HOOKS}.powerSGD_hook")
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START, "min_compression_rate": 1}
        return module.PowerSGDState(group, **options), getattr(module, name)
    if name == "post_localSGD_hook":
        module = importlib.import_module(f"{TORCH_HOOKS}.post_localSGD_hook")
        return module.PostLocalSGDState(group, group or collectives.group.WORLD, START), module.post_localSGD_hook
    module = importlib.import_module(f"{TORCH_HOOKS}.default_hooks")
    if name == "fp16_compress_wrapper":
        state, hook = hook_of_torch("powerSGD_hook", group)
        return state, (wrappers or module).fp16_compress_wrapper(hook)
    return group, getattr(module, name)


def for_torch(hook: Callable[..., Any], waits: bool) -> Callable[..., Any]:
    """A hook that torch's class takes: by its name it refuses some on CPU, which work there.

    Args:
        hook: the hook.
        waits: for Gloo, on which callbacks that communicate get into each other's way when there are several buckets.
    """

    def called(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        if waits:
            future.wait()
        return future

    called.__annotations__.clear()  # torch wants classes there; here they are text
    return called


def train(model: Any, rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    steps = []
    for step in range(STEPS):
        torch.manual_seed(step)
        batch = torch.randn(4 * size, 48)
        model.zero_grad()
        ddp_models.loss_of(model(batch.chunk(size)[rank])).backward()
        steps.append({name: grad.clone() for name, grad in ddp_models.gradients(model).items()})
        descend(model)
    return steps


def compare(rank: int, size: int, path: str, name: str) -> dict[str, float]:
    """Trains with torch's class on Gloo, the same on our groups, and ours; largest differences from the first."""
    importlib.import_module("rpcdist.collectives.torch_backend")
    runs = {}
    for backend in ("gloo", "rpcdist"):
        torch.distributed.init_process_group(backend, init_method=f"file://{path}{backend}", rank=rank, world_size=size)
        try:
            model: Any = torch.nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=0.005)
            state, hook = hook_of_torch(name, torch.distributed.group.WORLD)
            model.register_comm_hook(state, for_torch(hook, waits=backend == "gloo"))
            runs[backend] = train(model, rank, size)
        finally:
            torch.distributed.destroy_process_group()
    with world(rank, size, path):
        kinds: dict[str, tuple[Any, Any]] = {
            "ours": (collectives.group.WORLD, None),
            "ours without a group": (None, None),
        }
        kinds |= {"our wrapper": (None, comm_hooks)} if "wrapper" in name else {}
        for kind, (group, wrappers) in kinds.items():
            model = DistributedDataParallel(layers(), bucket_cap_mb=0.005)
            model.register_comm_hook(*hook_of_torch(name, group, wrappers))
            runs[kind] = train(model, rank, size)
            assert len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 3
    first = runs.pop("gloo")
    return {kind: max(map(difference, first, steps)) for kind, steps in runs.items()}


@scenario
def quantised(rank: int, size: int, name: str) -> float:
    """Gradients through our hook; returns how far they are from what torch's functions make of each rank's own."""
    import torch.ao.quantization as observers

    theirs = importlib.import_module(f"{TORCH_HOOKS}.quantization_hooks")
    per_channel = "perchannel" in name
    kind = "channel" if per_channel else "tensor"
    wanted: dict[int, torch.Tensor] = {}

    def simulate(_: object, bucket: comm_hooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
        everyone = [torch.empty_like(bucket.buffer()) for _ in range(size)]
        collectives.all_gather(everyone, bucket.buffer())
        total = torch.zeros_like(bucket.buffer())
        for each in everyone:
            rows = nn.functional.pad(each, (0, -len(each) % 512)).view(-1, 512) if per_channel else each
            observer = observers.PerChannelMinMaxObserver() if per_channel else observers.MinMaxObserver()
            observer(rows)
            scale, zero = observer.calculate_qparams()
            codes = getattr(theirs, f"_quantize_per_{kind}_backend")(rows, scale, zero)
            decoded = getattr(theirs, f"_dequantize_per_{kind}_backend")(codes, scale, zero)
            total += decoded.flatten()[: len(each)]
        wanted[bucket.index()] = total / size
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(wanted[bucket.index()])
        return future

    runs = []
    for hook in (simulate, getattr(theirs, name), getattr(comm_hooks, name)):
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.005)
        model.register_comm_hook(None, hook)
        runs.append(train(model, rank, size))
    return max(max(map(difference, runs[0], run)) for run in runs[1:])


@scenario
def by_type(rank: int, size: int, kind: str) -> float:
    """Registers a hook by its type; returns how far the first gradients are from the average."""
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.005)
    comm_hooks.register_ddp_comm_hook(comm_hooks.DDPCommHookType[kind], model)
    plain = DistributedDataParallel(layers(), bucket_cap_mb=0.005)
    return max(map(difference, train(model, rank, size)[:1], train(plain, rank, size)[:1]))


@scenario
def power_sgd_from_a_checkpoint(rank: int, size: int) -> tuple[float, tuple[float, int, int]]:
    """A state that is saved in the middle and loaded again leads to the same gradients."""
    results = []
    for reload in (False, True):
        model = DistributedDataParallel(layers(), bucket_cap_mb=0.005)
        state = comm_hooks.PowerSGDState(start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, comm_hooks.powerSGD_hook)
        train(model, rank, size)
        if reload:
            inner = model.module
            model = DistributedDataParallel(inner, bucket_cap_mb=0.005)
            train_once_without_steps(model, rank, size)
            train_once_without_steps(model, rank, size)
            state = pickle.loads(pickle.dumps(state))
            model.register_comm_hook(state, comm_hooks.powerSGD_hook)
        results.append(train_once_without_steps(model, rank, size))
    return difference(*results), state.compression_stats()


def train_once_without_steps(model: Any, rank: int, size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100)
    model.zero_grad()
    ddp_models.loss_of(model(torch.randn(4 * size, 48).chunk(size)[rank])).backward()
    return {name: grad.clone() for name, grad in ddp_models.gradients(model).items()}


def averages_each_gradient(state: object, bucket: Any) -> Any:
    """A hook of a program that looks at the gradients one by one; complex ones come as pairs of real numbers."""
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        pair = (2,) if parameter.is_complex() else ()
        assert gradient.shape == (*parameter.shape, *pair) and gradient.dtype is torch.bfloat16, gradient
        collectives.all_reduce(gradient, collectives.ReduceOp.AVG)
    return comm_hooks.noop_hook(state, bucket)


@scenario
def complex_gradients(rank: int, size: int) -> dict[str, Any]:
    """How far complex gradients are from the average under each hook, and the errors of hooks that refuse them."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.real, self.complex = nn.Linear(4, 4), nn.Linear(4, 2, dtype=torch.complex64)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.complex(self.real(rows.real) + 1j * rows.imag)
            return out.abs()

    def gradients(options: dict[str, Any], hook: Any) -> torch.Tensor:
        model = DistributedDataParallel(Mixed(), **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(3, 4, dtype=torch.complex64, generator=generator)).square().mean().backward()
        return torch.cat([torch.view_as_real(grad + 0j).flatten() for grad in ddp_models.gradients(model).values()])

    theirs = importlib.import_module(f"{TORCH_HOOKS}.default_hooks")
    hooks: dict[str, Any] = {name: getattr(comm_hooks, name) for name in ("allreduce_hook", "fp16_compress_hook")}
    hooks |= {name: getattr(comm_hooks, name) for name in ("bf16_compress_hook", "quantization_pertensor_hook")}
    hooks |= {name: getattr(comm_hooks, name) for name in ("quantization_perchannel_hook", "powerSGD_hook")}
    hooks["wrapper"] = comm_hooks.fp16_compress_wrapper(hooks["allreduce_hook"])
    hooks["wrapped own"] = comm_hooks.bf16_compress_wrapper(averages_each_gradient)
    hooks["wrapped powerSGD"] = comm_hooks.fp16_compress_wrapper(hooks["powerSGD_hook"])
    hooks["torch"] = theirs.bf16_compress_hook
    hooks["torch wrapper"] = theirs.fp16_compress_wrapper(theirs.allreduce_hook)
    hooks["own"] = lambda state, bucket: comm_hooks.noop_hook(state, bucket).then(lambda done: done.value().real)
    wanted = gradients({}, None)
    found: dict[str, Any] = {}
    low = {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}
    for name, hook, options in [*((name, hook, {}) for name, hook in hooks.items()), ("mixed precision", None, low)]:
        try:
            found[name] = (gradients(options, hook) - wanted).abs().max().item()
        except Exception as exc:
            found[name] = f"{type(exc).__name__}: {exc}"
    return found
