"""What the ranks of `group_pool` are asked to do by the tests of data parallel training."""

from __future__ import annotations

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

from rpcdist import collectives
from rpcdist.collectives import flight_recorder
from rpcdist.parallel import DistributedDataParallel, comm_hooks

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


def descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad.to_dense())


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(one) == list(other), (list(one), list(other))
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


# ---------------------------------------------------------------- torch as the oracle


def compare_with_torch(rank: int, size: int, path: str, name: str, options: dict[str, Any], train: bool) -> list[Any]:
    """Trains with torch's class on Gloo and with ours; returns the largest difference, and both bucket sizes."""
    case = ddp_models.CASES[name]
    batches = ddp_models.batches(case, 4)
    results, sizes = [], []
    for library in ("torch", "ours"):
        module = case.model().train(train)
        if library == "torch":
            torch.distributed.init_process_group("gloo", init_method=f"file://{path}t", rank=rank, world_size=size)
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
        with model.no_sync():
            for batch in batches[:2]:
                ddp_models.loss_of(model(batch[rank])).backward()
        ddp_models.loss_of(model(batches[2][rank])).backward()
        for batch in batches.flatten(0, 1):
            (ddp_models.loss_of(alone(batch)) / size).backward()
    return [difference(ddp_models.gradients(alone), ddp_models.gradients(model))]


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
def forget_a_branch(rank: int, size: int, forgetful: list[int]) -> str:
    """Ranks in `forgetful` use one branch, the others both, without `find_unused_parameters`."""
    model = DistributedDataParallel(ddp_models.Branches(), bucket_cap_mb=0.0001)
    rows = torch.randn(4, 8)
    for step in range(3):
        both = rank not in forgetful or step < 1
        try:
            ddp_models.loss_of(model(rows, True, both).values["scores"][0]).backward()
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
    return "nothing happened"


@scenario
def leave_early(rank: int, size: int) -> str:
    """Rank 1 leaves after a step."""
    model = DistributedDataParallel(plain())
    for step in range(3):
        if rank == 1 and step == 1:
            return "left"
        try:
            ddp_models.loss_of(model(torch.randn(4, 8))).backward()
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
    return "nothing happened"


@scenario
def wrap_different(rank: int, size: int, what: str) -> str:
    modules: dict[str, Callable[[], nn.Module]] = {
        "shape": lambda: nn.Linear(4, 3 + (rank == 1)),
        "names": lambda: nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] * (rank == 1))),
        "dtype": lambda: nn.Linear(4, 4, dtype=torch.float64 if rank == 1 else None),
        "strides": lambda: nn.Conv2d(3, 3, 2).to(memory_format=[torch.contiguous_format, torch.channels_last][rank]),  # type: ignore[call-overload]
        "options": lambda: nn.Linear(4, 4),
    }
    try:
        DistributedDataParallel(modules[what](), bucket_cap_mb=1 + rank if what == "options" else None)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing happened"


@scenario
def poison(rank: int, size: int, mode: str, only_first_layer: bool) -> list[str]:
    """Rank 1's gradients are NaN in the second step; returns the warnings."""
    module: Any = plain()
    model = DistributedDataParallel(module, check_finite=mode)  # type: ignore[arg-type]
    poisoned = False
    if rank == 1 and only_first_layer:
        module[0].weight.register_hook(lambda gradient: gradient * (float("nan") if poisoned else 1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            poisoned = step == 1
            model.zero_grad()
            loss = ddp_models.loss_of(model(torch.randn(4, 8)))
            if rank == 1 and poisoned and not only_first_layer:
                loss = loss * float("nan")
            loss.backward()
    return [str(warning.message) for warning in caught]


@scenario
def uneven(rank: int, size: int, by_initial: bool, name: str) -> Any:
    """Rank i has 2 + i inputs; compares every step with the sum over those that train, and the final models."""
    case = ddp_models.CASES[name]
    alone, module = case.model(), case.model()
    model = DistributedDataParallel(module)
    steps = [ddp_models.batches(case, size) for _ in range(2 + size)]
    worst = 0.0
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(2 + rank):
            training = [other for other in range(size) if step < 2 + other]
            model.zero_grad()
            alone.zero_grad()
            ddp_models.loss_of(model(steps[step][rank])).backward()
            for other in training:
                divisor = size if by_initial else len(training)
                (ddp_models.loss_of(alone(steps[step][other])) / divisor).backward()
            worst = max(worst, difference(ddp_models.gradients(alone), ddp_models.gradients(model)))
            descend(model)
            descend(alone)
    return worst, [parameter.detach().sum().item() for parameter in module.parameters()]


@scenario
def uneven_throw(rank: int, size: int) -> str:
    model = DistributedDataParallel(plain())
    done = 0
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + rank):
                ddp_models.loss_of(model(torch.randn(4, 8))).backward()
                done += 1
    except Exception as exc:
        return f"{done} {type(exc).__name__}: {exc}"
    return "nothing happened"


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
    """Checkpoints with and without the prefix; pickling; wrapping again; buffers of rank 0."""
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DistributedDataParallel(module)
    state = model.state_dict()
    found: list[Any] = [sorted(state) == sorted(f"module.{name}" for name in module.state_dict())]
    for given in (state, module.state_dict()):
        found.append(str(model.load_state_dict(given)))
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


# ---------------------------------------------------------------- with RPC

table = nn.Embedding(20, 8)


def look_up(words: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table(words)
    return found


def train_over_rpc(rank: int, size: int, path: str, options: dict[str, Any]) -> Any:
    """All ranks but the last train a model in parallel, on rows that they get from the last one."""
    from rpcdist import autograd, rpc

    torch.manual_seed(5)
    table.reset_parameters()
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}r"),
    )
    worst = 0.0
    if rank < size - 1:
        with world(rank, size - 1, path):
            model = DistributedDataParallel(plain(), **options)
            words = torch.randint(20, (size - 1, 6), generator=torch.Generator().manual_seed(0))
            for _ in range(3):
                with autograd.context() as context_id:
                    rows = rpc.rpc_sync(f"worker{size - 1}", look_up, args=(words[rank],))
                    autograd.backward(context_id, [ddp_models.loss_of(model(rows))])
                    captured = autograd.get_gradients(context_id)
                alone = plain()
                ddp_models.loss_of(alone(table(words.flatten()))).backward()
                mine = {name: captured[parameter] for name, parameter in model.module.named_parameters()}
                worst = max(worst, difference(ddp_models.gradients(alone), mine))
                assert all(parameter.grad is None for parameter in model.parameters())
            model(torch.randn(4, 8)).sum().backward()  # an ordinary pass still works
            assert all(parameter.grad is not None for parameter in model.parameters())
    rpc.shutdown()
    return worst
