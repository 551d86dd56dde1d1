"""The functions that the ranks of `rank_pool` run in the tests of data parallel training."""

from __future__ import annotations

import copy
import importlib
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import ddp_models
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision as TorchMixedPrecision

from rpcdist import collectives
from rpcdist.collectives import flight_recorder
from rpcdist.data import DistributedSampler
from rpcdist.errors import ConfigError
from rpcdist.parallel import DistributedDataParallel, MixedPrecision, comm_hooks

LIMIT_S = 30.0
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def world(rank: int, size: int, path: str, timeout_s: float = LIMIT_S) -> Iterator[None]:
    collectives.init_process_group(
        "tcp", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        collectives.destroy_process_group()


def part(batch: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return batch.chunk(size)[rank]


def compare_with_single(rank: int, size: int, path: str, name: str, options: dict[str, Any], steps: int = 3) -> float:
    """Trains in parallel and alone; returns the largest difference of gradients and parameters over all steps."""
    case = ddp_models.CASES[name]
    alone, together = case.model(), case.model()
    worst = 0.0
    with world(rank, size, path):
        if rank:
            with torch.no_grad():
                for parameter in together.parameters():
                    parameter.zero_()  # rank 0's values count
        model = DistributedDataParallel(together, **options)
        for batch in ddp_models.batches(case, steps):
            for module, rows in ((alone, batch), (model, part(batch, rank, size))):
                module.zero_grad()
                ddp_models.loss_of(module(rows)).backward()
            worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
            for module in (alone, model):
                descend(module)
    return max(worst, difference(dict(alone.named_parameters()), dict(together.named_parameters())))


def compare_with_parts(rank: int, size: int, path: str, name: str) -> float:
    """Trains in parallel, and alone part by part: batch statistics are those of a part, and rank 0's are kept."""
    case = ddp_models.CASES[name]
    alone, together = case.model().train(), case.model().train()
    worst = 0.0
    with world(rank, size, path):
        model = DistributedDataParallel(together)
        for batch in ddp_models.batches(case, 3):
            model.zero_grad()
            alone.zero_grad()
            before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
            for other in reversed(range(size)):
                alone.load_state_dict(before, strict=False)
                (ddp_models.loss_of(alone(part(batch, other, size))) / size).backward()
            ddp_models.loss_of(model(part(batch, rank, size))).backward()
            worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
            if rank == 0:
                worst = max(worst, difference(dict(alone.named_buffers()), dict(together.named_buffers())))
            for module in (alone, model):
                descend(module)
    return worst


def descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad.to_dense())


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(one) == list(other), (list(one), list(other))
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


# ---------------------------------------------------------------- torch as the oracle


def compare_with_torch(
    rank: int, size: int, path: str, name: str, options: dict[str, Any], backend: str = "gloo"
) -> list[Any]:
    """Trains with torch's class and with ours; returns the largest difference, and both bucket sizes.

    torch's groups are Gloo's, or ours under the name "rpcdist".
    """
    importlib.import_module("rpcdist.collectives.torch_backend")
    case = ddp_models.CASES[name]
    batches = ddp_models.batches(case, 4)
    results, sizes = [], []
    for library in ("torch", "ours"):
        module = case.model().train()
        if library == "torch":
            torch.distributed.init_process_group(backend, init_method=f"file://{path}t", rank=rank, world_size=size)
            model: Any = torch.nn.parallel.DistributedDataParallel(module, **options)
        else:
            collectives.init_process_group("tcp", init_method=f"file://{path}", rank=rank, world_size=size)
            model = DistributedDataParallel(module, **options)
        steps = []
        for batch in batches:
            model.zero_grad()
            ddp_models.loss_of(model(part(batch, rank, size))).backward()
            steps.append(ddp_models.gradients(model))
            descend(model)
        results.append([*steps, dict(module.named_parameters()), dict(module.named_buffers()) or {"": torch.zeros(1)}])
        sizes.append(bucket_sizes(model))
        (torch.distributed if library == "torch" else collectives).destroy_process_group()
    return [max(difference(one, other) for one, other in zip(*results, strict=True)), *sizes]


def bucket_sizes(model: Any) -> list[int]:
    data = model._get_ddp_logging_data()
    return [int(size) for size in (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(", ")]


# ---------------------------------------------------------------- one scenario each


def scenario(function: Callable[P, T]) -> Callable[P, T]:
    """Runs in a group; the function's first arguments are rank and size, the path has gone."""

    @wraps(function)
    def run(rank: int, size: int, path: str, *rest: Any) -> T:
        with world(rank, size, path):
            return function(rank, size, *rest)  # type: ignore[call-arg, arg-type]

    return run  # type: ignore[return-value]


def plain(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return ddp_models.mlp()


@scenario
def accumulate(rank: int, size: int, view: bool) -> list[float]:
    """Two micro-batches without and one with communication; the sum of all is averaged."""
    model = DistributedDataParallel(plain(), gradient_as_bucket_view=view)
    alone = plain()
    for number in range(2):
        torch.manual_seed(number)
        batches = torch.randn(3, size, 4, 8)
        model.zero_grad(set_to_none=number == 0)
        alone.zero_grad()
        for step, batch in enumerate(batches):
            with model.no_sync(enabled=step < 2):
                ddp_models.loss_of(model(batch[rank])).backward()
        for batch in batches.flatten(0, 1):
            (ddp_models.loss_of(alone(batch)) / size).backward()
    return [difference(ddp_models.gradients(alone), ddp_models.gradients(model))]


@scenario
def prepare_late(rank: int, size: int, options: dict[str, Any]) -> list[float]:
    """As Accelerate and Lightning do: all forward passes are under `no_sync`, the last backward pass is to average."""
    model = DistributedDataParallel(plain(), **options)
    alone = plain()
    worst = []
    for number in range(3):
        torch.manual_seed(number)
        batches = torch.randn(2, size, 4, 8)
        for each in (model, alone):
            each.zero_grad()
        with model.no_sync():
            losses = [ddp_models.loss_of(model(batch[rank])) for batch in batches]
            losses[0].backward()
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        losses[1].backward()
        model.reducer._delay_all_reduce()
        for batch in batches.flatten(0, 1):
            (ddp_models.loss_of(alone(batch)) / size).backward()
        worst.append(difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
    return worst


@scenario
def use_branches(rank: int, size: int, options: dict[str, Any], plans: list[list[tuple[bool, bool]]]) -> Any:
    """In each step rank i uses the branches plans[step][i]."""
    torch.manual_seed(1)
    module = ddp_models.Branches()
    alone = ddp_models.Branches()
    alone.load_state_dict(module.state_dict())
    model = DistributedDataParallel(module, **options)
    rows = torch.randn(size, 5, 8)
    worst, present = 0.0, []
    for plan in plans:
        for each in (alone, model):
            each.zero_grad()
        ddp_models.loss_of(model(rows[rank], *plan[rank]).values["scores"][0]).backward()
        for other in range(size):
            (ddp_models.loss_of(alone(rows[other], *plan[other]).values["scores"][0]) / size).backward()
        worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
        present.append([name for name, parameter in module.named_parameters() if parameter.grad is not None])
    return worst, present


@scenario
def use_hook(rank: int, size: int, hook: str, view: bool) -> float:
    model = DistributedDataParallel(plain(), gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
    chosen: Any = getattr(comm_hooks, hook)
    if "wrapper" in hook:
        chosen = chosen(comm_hooks.allreduce_hook)
    model.register_comm_hook(None, chosen)
    alone = plain()
    for number in range(3):
        torch.manual_seed(number)
        batch = torch.randn(size, 6, 8)
        for each, rows in ((alone, batch[rank] if hook == "noop_hook" else batch.flatten(0, 1)), (model, batch[rank])):
            each.zero_grad()
            ddp_models.loss_of(each(rows)).backward()
    return difference(ddp_models.gradients(alone), ddp_models.gradients(model))


@scenario
def overlap(rank: int, size: int) -> Any:
    """Whether reductions began, on their thread, before the backward pass was over."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), bucket_cap_mb=0.25)
    rows = torch.randn(256, 256)
    ended: list[int] = []
    rows.requires_grad_()  # the gradient of the input is the last thing that is computed
    rows.register_hook(lambda gradient: ended.append(time.time_ns()))
    for _ in range(3):
        model(rows).square().mean().backward()
    begun = [record.started_ns for record in flight_recorder.entries() if record.operation == "all_reduce"][-8:]
    return len(model.reducer.buckets), sum(start < ended[-1] for start in begun), sorted(begun) == begun


@scenario
def checkpoint(rank: int, size: int, reentrant: bool, options: dict[str, Any]) -> float:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for layer in (self.first, self.second, self.second):
                rows = torch.utils.checkpoint.checkpoint(layer, rows.tanh(), use_reentrant=reentrant)
            return rows

    torch.manual_seed(0)
    alone, module = Recomputed(), Recomputed()
    module.load_state_dict(alone.state_dict())
    model = DistributedDataParallel(module, **options)
    worst = 0.0
    for _ in range(4):
        torch.manual_seed(7)
        batch = torch.randn(size, 4, 8, requires_grad=True)
        for each, rows in ((alone, batch.flatten(0, 1)), (model, batch[rank])):
            each.zero_grad()
            ddp_models.loss_of(each(rows)).backward()
        worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
    return worst


@scenario
def save_and_load(rank: int, size: int) -> list[Any]:
    """Checkpoints, whose names have the prefix; pickling; wrapping again; buffers of rank 0."""
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DistributedDataParallel(module)
    state = model.state_dict()
    found: list[Any] = [sorted(state) == sorted(f"module.{name}" for name in module.state_dict())]
    found.append(str(model.load_state_dict(state)))
    found.append(bool(model.load_state_dict(module.state_dict(), strict=False).missing_keys))
    copied = pickle.loads(pickle.dumps(model))
    rows = torch.randn(4, 4) + rank
    for each in (model, copied):
        each(rows).square().mean().backward()
    found.append(difference(ddp_models.gradients(model), ddp_models.gradients(copied)))
    before = torch.stack([module[1].running_mean[0], module[1].num_batches_tracked.float()])
    gathered = [torch.empty(2) for _ in range(size)]
    collectives.all_gather(gathered, before)
    model(rows)  # gives all ranks the buffers of rank 0 first
    found.append(float((gathered[0][1] + 1 - module[1].num_batches_tracked).abs()))
    del model, copied
    again = DistributedDataParallel(module)
    module.zero_grad()
    again(rows).square().mean().backward()
    found.append(again.reducer.iteration)
    return found


@scenario
def autocast_and_mixed(rank: int, size: int) -> list[str]:
    """Parameters of several dtypes, under autocast."""
    module: Any = nn.ModuleDict({"low": nn.Linear(8, 8, dtype=torch.bfloat16), "high": nn.Linear(8, 8)})
    module.forward = lambda rows: module["high"](module["low"](rows))
    model = DistributedDataParallel(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    loss.backward()
    sums = [parameter.grad.double().sum() for parameter in module.parameters()]
    mine = torch.stack(sums)
    everybody = [torch.empty_like(mine) for _ in range(size)]
    collectives.all_gather(everybody, mine)
    assert all(torch.equal(each, mine) for each in everybody)
    return [str(parameter.grad.dtype) for parameter in module.parameters()]


PRECISIONS = [
    ("wide", MixedPrecision(torch.bfloat16, torch.bfloat16)),
    ("wide", MixedPrecision(torch.bfloat16, torch.float32)),
    ("cnn", TorchMixedPrecision(torch.float16, None, torch.float16)),
    ("shared", MixedPrecision(reduce_dtype=torch.bfloat16)),
]


@scenario
def mixed_precision(rank: int, size: int) -> list[bool]:
    """Whether gradients, parameters and outputs are those of the same done by hand, in single precision outside."""
    return [_as_by_hand(rank, size, ddp_models.CASES[name], precision) for name, precision in PRECISIONS]


def _as_by_hand(rank: int, size: int, case: ddp_models.Case, precision: Any) -> bool:
    by_hand, together = case.model().float(), case.model().float()
    model = DistributedDataParallel(together, mixed_precision=precision)
    dtype = precision.param_dtype or torch.float32
    for batch in ddp_models.batches(case, 3):
        model.zero_grad()
        output = model(part(batch, rank, size).float())
        assert output.dtype is dtype
        ddp_models.loss_of(output).backward()
        parts = []
        for other in range(size):
            low = copy.deepcopy(by_hand).to(dtype)
            ddp_models.loss_of(low(part(batch, other, size).to(dtype))).backward()
            parts.append([parameter.grad for parameter in low.parameters() if parameter.grad is not None])
        wire_dtype = precision.reduce_dtype or dtype
        for parameter, one, other in zip(by_hand.parameters(), *parts, strict=True):
            parameter.grad = ((one.to(wire_dtype) + other.to(wire_dtype)) / size).float()
        if difference(ddp_models.gradients(by_hand), ddp_models.gradients(model)):
            return False
        for module in (by_hand, model):
            descend(module)
    in_full = all(value.dtype is torch.float32 for value in together.parameters())
    low_buffers = [value.dtype for value in together.buffers() if value.is_floating_point()]
    assert low_buffers == [precision.buffer_dtype] * len(low_buffers)
    return in_full and not difference(dict(by_hand.named_parameters()), dict(together.named_parameters()))


@scenario
def leave_to_ranks(rank: int, size: int) -> list[float]:
    """Ignored parameters keep their own values and gradients; delayed ones are averaged in one piece."""
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        module[2].bias.fill_(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.bias"])
    named = [("1.weight", module[1].weight), ("1.bias", module[1].bias)]
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module[0].weight
    )
    for _ in range(2):
        model.zero_grad()
        (model(torch.randn(4, 4)) * (1 + rank)).sum().backward()
    mine = torch.stack([module[1].weight.grad.sum(), module[1].bias.grad.sum(), module[0].weight.grad.sum()])
    everybody = [torch.empty_like(mine) for _ in range(size)]
    collectives.all_gather(everybody, mine)
    spread = float((torch.stack(everybody) - mine).abs().max())
    return [spread, float(module[2].bias.grad[0]), float(module[2].bias[0])]


@scenario
def delay_for_too_short(rank: int, size: int) -> str:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    named = [("0.weight", module[0].weight)]
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module[1].weight
    )
    try:
        model(torch.randn(4, 4)).sum().backward()
    except ConfigError as error:
        return str(error)
    return "no error"


@scenario
def sample(rank: int, size: int) -> list[int]:
    """This rank's part of six elements."""
    return list(DistributedSampler(range(6), shuffle=False))


@scenario
def run_guide(rank: int, size: int) -> None:
    """The code of the page about data parallel training."""
    importlib.import_module("docs_programs").run_page("docs/ddp.md")


@scenario
def step_in_backward(rank: int, size: int, options: dict[str, Any], hook: str) -> list[Any]:
    """torch's optimizers in backward, given before and after wrapping; largest difference from steps after backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its package scripts what is deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward
    found = []
    for early in (True, False):
        modules = [plain().double() for _ in range(2)]
        if early:
            _apply_optimizer_in_backward(torch.optim.Adam, modules[0].parameters(), {"lr": 0.1})
        models = [DistributedDataParallel(module, **options) for module in modules]
        if not early:
            _apply_optimizer_in_backward(torch.optim.Adam, modules[0].parameters(), {"lr": 0.1})
        if hook:
            for model in models:
                model.register_comm_hook(None, getattr(comm_hooks, hook))
        optimizer = torch.optim.Adam(modules[1].parameters(), lr=0.1)
        for step in range(6):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            syncs = step % 3 != 1
            for model in models:
                with model.no_sync(enabled=not syncs):
                    ddp_models.loss_of(model(rows)).backward()
            if syncs:
                optimizer.step()
                optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in modules[0].parameters())
        found.append(difference(dict(modules[0].named_parameters()), dict(modules[1].named_parameters())))
    return found


@scenario
def user_hooks(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Hooks that run when a gradient was accumulated, registered before and after wrapping."""

    def clip(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    def step_and_clear(parameter: torch.Tensor) -> None:
        step(parameter)
        parameter.grad = None

    found: dict[str, Any] = {}
    for hook in (clip, step, step_and_clear):
        for when in ("before", "after", "on the node"):
            module: Any = nn.Sequential(nn.Linear(8, 400), nn.Linear(400, 400), nn.Linear(400, 2)).double()
            if when == "on the node" and hook is clip:
                continue
            nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in module.parameters()]
            model = DistributedDataParallel(module, **options) if when != "before" else None
            for parameter, node in zip(module.parameters(), nodes, strict=True):
                if when == "on the node":
                    node.register_hook(lambda *_, parameter=parameter, hook=hook: hook(parameter))
                else:
                    parameter.register_post_accumulate_grad_hook(hook)
            model = model or DistributedDataParallel(module, **options)
            alone = copy.deepcopy(module)
            for parameter in alone.parameters():
                parameter._post_accumulate_grad_hooks = None
            batch = torch.randn(size, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            try:
                for _ in range(3):
                    model.zero_grad()
                    ddp_models.loss_of(model(batch[rank])).backward()
            except Exception as exc:
                found[f"{hook.__name__} {when}"] = f"{type(exc).__name__}: {exc}"
                continue
            parts = []
            for other in range(size):
                alone.zero_grad()
                ddp_models.loss_of(alone(batch[other])).backward()
                parts.append([parameter.grad.clamp(-0.01, 0.01) for parameter in alone.parameters()])
            wanted = [sum(each) / size for each in zip(*parts, strict=True)]
            pairs = zip(module.parameters(), wanted, strict=True)
            found[f"{hook.__name__} {when}"] = max(float((one.grad - other).abs().max()) for one, other in pairs)
    return found


@scenario
def logging_data(rank: int, size: int) -> list[Any]:
    """Buckets, times and errors of iterations, and the mesh that a model was wrapped with."""
    mesh = collectives.init_device_mesh("cpu", (size,))
    by_mesh = DistributedDataParallel(plain(), device_mesh=mesh)
    assert by_mesh.device_mesh is mesh and by_mesh.process_group.size() == size
    found: list[Any] = []
    for skip in (False, True):
        module = ddp_models.Branches()
        options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skip, "bucket_cap_mb": 288 / 2**20}
        model = DistributedDataParallel(module, **options)  # type: ignore[arg-type]
        for _ in range(2):
            ddp_models.loss_of(model(torch.randn(4, 8), True).values["scores"][0]).backward()
        data: Any = model._get_ddp_logging_data()
        assert "comm_hook" not in data and data["dtypes"] == "float" and data["has_error"] == 0
        moments = [data[name] for name in ("forward_compute_time_start", "backward_compute_time_start")]
        moments += [data["backward_comm_time_start"], data["backward_comm_time_end"]]
        assert moments == sorted(moments) and moments[0] > 0
        for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
            assert int(data[name]) > 0, name
        overlap = int(data["backward_compute_comm_overlap_time"])
        assert overlap <= min(int(data["backward_compute_time"]), int(data["backward_comm_time"]))
        found.append(data["num_buckets_reduced"])
    model = DistributedDataParallel(ddp_models.Branches(), static_graph=True)
    errors = []
    for left in (True, True, False):
        try:
            ddp_models.loss_of(model(torch.randn(4, 8), left, not left).values["scores"][0]).backward()
        except RuntimeError as exc:
            errors.append(str(exc))
    data = model._get_ddp_logging_data()
    model = DistributedDataParallel(ddp_models.Branches(), static_graph=True)
    for uses_left in (True, True, False):
        ddp_models.loss_of(model(torch.randn(4, 8), uses_left).values["scores"][0]).backward()
    try:
        model(torch.randn(4, 8), True)
    except RuntimeError as exc:
        errors.append(str(exc))
    return [*found, data["has_error"], data["error"], *errors]
