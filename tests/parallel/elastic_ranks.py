"""The functions that the ranks of `rank_pool` run in the tests of `ElasticDataParallel`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from rpcdist.collectives import FileStore, Store
from rpcdist.parallel import ElasticDataParallel
from rpcdist.testing import eventually
from rpcdist.testing.limits import LIMIT_S

__all__ = ["PHASES", "Failed", "Outcome", "Plan", "train"]

RECORDS = "rpcdist.collectives._group.elastic_rounds.ElasticRecords"
PHASES = {
    "comes": f"{RECORDS}.register",
    "closes the round": f"{RECORDS}.close_round",
    "gives its state": "rpcdist.parallel.elastic.send_state",
    "takes over a state": "rpcdist.parallel.elastic.take_over",
}
"""The actions during the formation of a group, and their functions."""


@dataclass(frozen=True)
class Plan:
    """A training, and what happens to it.

    Attributes:
        num_ranks, min_ranks, total, timeout_s: of the training.
        victims: number of the process to where it dies in step `step`; "stops" stops it, "raises" has it fail.
        step: when that happens.
        waits_for: number of the process to the key that it waits for before it comes.
        holds: steps inside of which all wait until somebody wants to come in; the next one is done with it. A rank that
        comes earlier is not seen there, so it waits for "holds/" and the step's number.
        seeds: number of the process to its seed; others have 0.
        widths: number of the process to the width of its model; others have 8.
        first_to: of `PHASES`: the first process that gets so far in forming the group dies there.
    """

    num_ranks: int = 3
    min_ranks: int = 3
    total: int = 8
    timeout_s: float = LIMIT_S
    victims: dict[int, str] = field(default_factory=dict)
    step: int = 3
    waits_for: dict[int, str] = field(default_factory=dict)
    holds: tuple[int, ...] = ()
    seeds: dict[int, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)
    first_to: str = ""


@dataclass(frozen=True)
class Outcome:
    """The state of a process at the end.

    Attributes:
        state: parameters and the optimizer's state.
        batches_tracked: forward passes that count for the running statistics.
        counted: the steps that counted here, with the size of the world.
        restarts: how often the group was formed again.
    """

    state: list[float]
    batches_tracked: int
    counted: list[tuple[int, int]]
    restarts: int


class Momentum:
    """An optimizer with a state; torch's take seconds to be imported, in each process that takes a dead one's place.

    Attributes:
        before, after: called in a step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        if self.before is not None:
            self.before()
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            assert parameter.grad is not None
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=0.05)
        if self.after is not None:
            self.after()

    def state_dict(self) -> dict[str, Any]:
        return {"velocities": self.velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.velocities = state["velocities"]


class Failed(Exception):
    """The error of a victim that must raise."""


@patch("rpcdist.parallel.elastic.STORE_CHECK_INTERVAL_S", 0.0)
def train(number: int, size: int, path: str, plan: Plan) -> Outcome:
    """Trains as process `number`; the ranks are chosen by the training."""
    torch.manual_seed(plan.seeds.get(number, 0))
    width = plan.widths.get(number, 8)
    module = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = Momentum(module.parameters())
    counted: list[tuple[int, int]] = []
    with ExitStack() as stack:
        store = stack.enter_context(FileStore(path, timeout=LIMIT_S))
        if number in plan.waits_for:
            store.wait([plan.waits_for[number]])
        if plan.first_to:
            stack.enter_context(_die_as_the_first(PHASES[plan.first_to], store))
        model = ElasticDataParallel(
            module,
            optimizer,
            store,
            num_ranks=plan.num_ranks,
            min_ranks=plan.min_ranks,
            timeout=timedelta(seconds=plan.timeout_s),
            bucket_cap_mb_list=[0.0001, 0.0001],
        )
        for step in model.steps(plan.total):
            if step.number == plan.step and number in plan.victims and len(counted) == plan.step:
                _arrange(plan.victims[number], number, module, optimizer, store)
            with step:
                if step.number in plan.holds:
                    store.set(f"holds/{step.number}", b"1")
                    eventually(model._elastic.others_wait, within_s=LIMIT_S)
                inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step.number + step.rank))
                model(inputs).square().mean().backward()
            if step.counted:
                counted.append((step.number, step.world_size))
                store.set(f"done/{step.number}/{step.world_size}", b"1")
        tensors = [*module.parameters(), *optimizer.velocities]
        model.close()
    return Outcome(
        [value for tensor in tensors for value in tensor.flatten().tolist()],
        int(module[1].num_batches_tracked),  # type: ignore[arg-type]
        counted,
        model.num_restarts,
    )


@contextmanager
def _die_as_the_first(name: str, store: Store) -> Iterator[None]:
    """Has this process die when it has done what the function of this name does, unless another one has died of it."""
    function = resolve_name(name)

    def done(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if store.add("dead", 1) == 1:
            _end(signal.SIGKILL, -1, store)
        return result

    with patch(name, done):
        yield


def _arrange(place: str, number: int, module: nn.Sequential, optimizer: Momentum, store: Store) -> None:
    """Has this process die, or stop, or fail, at a place in the step that begins now."""
    end = partial(_end, signal.SIGSTOP if place == "stops" else signal.SIGKILL, number, store)
    match place:
        case "forward" | "stops":
            module.register_forward_pre_hook(lambda *_: end())
        case "backward":  # between the two buckets
            module[0].weight.register_hook(lambda _: end())  # type: ignore[operator]
        case "before the optimizer steps":
            optimizer.before = end
        case "after the optimizer stepped":
            optimizer.after = end
        case "raises":
            module.register_forward_pre_hook(_fail)


def _end(how: signal.Signals, number: int, store: Store) -> None:
    if not store.check([f"gone/{number}"]):  # a process that was stopped goes on after that
        store.set(f"gone/{number}", b"1")
        os.kill(os.getpid(), how)


def _fail(*_: object) -> None:
    raise Failed("as it was told")
