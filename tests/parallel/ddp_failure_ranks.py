"""The functions that the ranks of `rank_pool` run in the tests of failures in data parallel training."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import ddp_models
import torch
from ddp_ranks import checkpoint, plain, scenario, world
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel import DistributedDataParallel, comm_hooks

STALL_LIMIT_S = 2.5


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def train_until_error(model: DistributedDataParallel, steps: int = 3) -> str:
    for _ in range(steps):
        try:
            ddp_models.loss_of(model(torch.randn(4, 8))).backward()
        except Exception as exc:
            return text_of(exc)
    return "nothing happened"


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


def stall(rank: int, size: int, path: str) -> str:
    """In the second step rank 1 never comes to its backward pass: it waits until rank 0 has noticed."""
    with world(rank, size, path, STALL_LIMIT_S):
        model = DistributedDataParallel(plain())
        ddp_models.loss_of(model(torch.randn(4, 8))).backward()
        group = collectives.group.WORLD
        assert isinstance(group, ProcessGroup)
        store = group.get_group_store()
        loss = ddp_models.loss_of(model(torch.randn(4, 8)))
        if rank == 1:
            store.wait(["noticed"], timedelta(seconds=20))
            return "waited"
        try:
            loss.backward()
            return "nothing happened"
        except Exception as exc:
            return text_of(exc)
        finally:
            store.set("noticed", "yes")


@scenario
def fail_in_backward(rank: int, size: int, killed: bool) -> str:
    """The second backward pass of rank 1 fails in the middle, and rank 1 goes on; or it is killed there."""
    module: Any = plain()
    model = DistributedDataParallel(module, bucket_cap_mb=0.0001)
    passes = []

    def hook(gradient: torch.Tensor) -> None:
        passes.append(gradient)
        if rank == 1 and len(passes) == 2:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a mistake in a hook")

    module[2].weight.register_hook(hook)
    ddp_models.loss_of(model(torch.randn(4, 8))).backward()
    try:
        ddp_models.loss_of(model(torch.randn(4, 8))).backward()
    except ValueError:
        return train_until_error(model)
    except Exception as exc:
        return text_of(exc)
    return "nothing happened"


@scenario
def never_reach(rank: int, size: int) -> list[str]:
    """The loss is not computed from what the forward pass returned; and a pass whose gradients are not all there."""
    module: Any = plain()
    model = DistributedDataParallel(module)
    rows = torch.randn(4, 8)
    model(rows)
    module[0](rows).sum().backward()
    return [train_until_error(model, 1), train_until_error(model, 2)]


@scenario
def unfreeze(rank: int, size: int) -> list[str]:
    """A parameter is frozen after wrapping, which is a matter of the options; another one is unfrozen."""
    module: Any = plain()
    module[0].weight.requires_grad_(False)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    module[2].bias.requires_grad_(False)
    found = [train_until_error(model)]
    module[0].weight.requires_grad_()
    return [*found, train_until_error(model)]


@scenario
def use_twice(rank: int, size: int) -> str:
    """A layer under reentrant checkpointing gets several gradients in one pass."""
    try:
        checkpoint.__wrapped__(rank, size, True, {})  # type: ignore[attr-defined]
    except Exception as exc:
        return text_of(exc)
    return "nothing happened"


def annotated(**annotations: object) -> Callable[[object, Any], Any]:
    """A comm hook whose annotations are those."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        raise AssertionError("a hook that was refused is not called")

    hook.__annotations__ = annotations
    return hook


@scenario
def break_hooks(rank: int, size: int) -> dict[str, str]:
    """Comm hooks that are none, or do not do what they should: in every rank's own process the same."""

    def fails(state: object, bucket: comm_hooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise ValueError("no future")

    def brings_text(state: object, bucket: comm_hooks.GradBucket) -> torch.futures.Future[str]:
        future: torch.futures.Future[str] = torch.futures.Future()
        future.set_result("a text")
        return future

    def fails_later(state: object, bucket: comm_hooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(ValueError("later"))  # type: ignore[arg-type]
        return future

    def bringing(make: Callable[[torch.Tensor], object]) -> Callable[..., object]:
        def hook(state: object, bucket: comm_hooks.GradBucket) -> object:
            future: torch.futures.Future[object] = torch.futures.Future()
            future.set_result(make(bucket.buffer()))
            return future

        return hook

    hooks: dict[str, Any] = {
        "returns none": lambda state, bucket: None,
        "returns a tensor": lambda state, bucket: bucket.buffer(),
        "returns a work": lambda state, bucket: collectives.all_reduce(bucket.buffer(), async_op=True),
        "brings one element": bringing(lambda buffer: buffer.mean(0, keepdim=True)),
        "brings too many": bringing(lambda buffer: torch.cat([buffer, buffer])),
        "brings doubles": bringing(torch.Tensor.double),
        "brings integers": bringing(torch.Tensor.long),
        "brings complex": bringing(lambda buffer: buffer.to(torch.complex64)),
        "brings sparse": bringing(torch.Tensor.to_sparse),
        "brings meta": bringing(lambda buffer: buffer.to("meta")),
        "brings two": bringing(lambda buffer: [buffer, buffer]),
        "brings none": bringing(lambda buffer: None),
        "is never done": lambda state, bucket: torch.futures.Future(),
        "fails": fails,
        "brings a text": brings_text,
        "fails later": fails_later,
        "is none": 3,
        "takes one": lambda bucket: bucket,
        "takes a number": annotated(bucket=int),
        "returns a number": annotated(**{"bucket": comm_hooks.GradBucket, "return": int}),
        "returns nothing": annotated(**{"return": None}),
    }
    found = {}
    for name, hook in hooks.items():
        model = DistributedDataParallel(plain())
        try:
            model.register_comm_hook(None, hook)
        except Exception as exc:
            found[name] = text_of(exc)
            continue
        model.process_group.set_timeout(timedelta(seconds=0.5 if name == "is never done" else 30))
        found[name] = train_until_error(model)
    try:
        model = DistributedDataParallel(plain())
        for _ in range(2):
            model.register_comm_hook(None, comm_hooks.allreduce_hook)
    except Exception as exc:
        found["twice"] = text_of(exc)
    return found


@scenario
def wrap_badly(rank: int, size: int) -> dict[str, str]:
    """Constructors and hooks that are refused; the processes stay usable."""
    stepping: Any = import_module("torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks")
    linear: Any = nn.Linear(2, 2)
    cases: dict[str, Callable[[], object]] = {
        "nothing to train": lambda: DistributedDataParallel(nn.ReLU()),
        "lazy": lambda: DistributedDataParallel(nn.LazyLinear(3)),
        "two devices": lambda: DistributedDataParallel(linear, device_ids=[0, 1]),
        "cpu device": lambda: DistributedDataParallel(linear, device_ids=[0]),
        "mixed precision": lambda: DistributedDataParallel(linear, mixed_precision=object()),
        "mesh": lambda: DistributedDataParallel(linear, device_mesh=object()),
        "cap": lambda: DistributedDataParallel(linear, bucket_cap_mb=-1),
        "half delayed": lambda: DistributedDataParallel(linear, param_to_hook_all_reduce=linear.weight),
        "group": lambda: DistributedDataParallel(linear, process_group=3),  # type: ignore[arg-type]
        "optimizer": lambda: DistributedDataParallel(linear)._register_fused_optim(torch.optim.SGD),
        "optimizer in a hook": lambda: DistributedDataParallel(linear).register_comm_hook(
            None, stepping._hook_then_optimizer(comm_hooks.allreduce_hook, None)
        ),
        "built-in hook": lambda: DistributedDataParallel(linear)._register_builtin_comm_hook("allreduce"),  # type: ignore[arg-type]
        "sample rate": lambda: DistributedDataParallel(linear)._set_ddp_runtime_logging_sample_rate(0),
    }
    found = {}
    for name, make in cases.items():
        try:
            make()
        except Exception as exc:
            found[name] = text_of(exc)
    return found
