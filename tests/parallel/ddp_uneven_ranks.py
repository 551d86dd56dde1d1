"""The functions that the ranks of `rank_pool` run in the tests of uneven inputs."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import ddp_models
import torch
from ddp_ranks import descend, difference, plain, scenario

from rpcdist import collectives
from rpcdist.collectives import ProcessGroup
from rpcdist.parallel import DistributedDataParallel, Join, algorithms, comm_hooks
from rpcdist.parallel.algorithms import Joinable, JoinHook


@scenario
def uneven(rank: int, size: int, by_initial: bool, name: str, options: dict[str, Any], first: int = 2) -> Any:
    """Rank i has `first` + i inputs; compares every step with the sum over those that train, and the final models."""
    case = ddp_models.CASES[name]
    alone, module = case.model(), case.model()
    by_hand = options.pop("by hand", False)
    model = DistributedDataParallel(module, **options)
    model.require_manual_backward_finalization = by_hand
    steps = [ddp_models.batches(case, size) for _ in range(first + size)]
    worst = 0.0
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(first + rank):
            training = [other for other in range(size) if step < first + other]
            model.zero_grad()
            alone.zero_grad()
            ddp_models.loss_of(model(steps[step][rank])).backward()
            if by_hand:
                model.finalize_backward()
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
def uneven_with_hook(rank: int, size: int) -> float:
    """Ranks without data take part in what a comm hook communicates; returns how far the models are apart."""
    module = plain()
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    return _train_unevenly(rank, size, model, never_sync=False)


@scenario
def uneven_without_sync(rank: int, size: int) -> float:
    """In every other iteration nobody averages."""
    return _train_unevenly(rank, size, DistributedDataParallel(plain()), never_sync=True)


def _train_unevenly(rank: int, size: int, model: DistributedDataParallel, never_sync: bool) -> float:
    torch.manual_seed(rank)
    with model.join():
        for step in range(1 + 2 * rank):
            with model.no_sync() if never_sync and step % 2 else contextlib.nullcontext():
                ddp_models.loss_of(model(torch.randn(4, 8))).backward()
            if not (never_sync and step % 2):
                descend(model)
                model.zero_grad()
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everybody = [torch.empty_like(mine) for _ in range(size)]
    collectives.all_gather(everybody, mine)
    return max(float((each - mine).abs().max()) for each in everybody)


class Counter(Joinable):
    """Counts the iterations of all ranks, as an example of a `Joinable` of one's own."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self.total = 0
        self.last: bool | None = None
        self.given: dict[str, object] = {}

    def count(self, mine: int = 1, notify: bool = True) -> None:
        if notify:
            Join.notify_join_context(self)
        number = torch.tensor([mine])
        collectives.all_reduce(number, group=self._group)
        self.total += int(number)

    def join_hook(self, **kwargs: object) -> JoinHook:
        self.given = kwargs
        return CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> ProcessGroup:
        return self._group


class CounterHook(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def main_hook(self) -> None:
        self._counter.count(0, notify=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._counter.last = is_last_joiner


@scenario
def join_several(rank: int, size: int, counter_first: bool) -> Any:
    """A model and a counter under one `Join`; then one that is switched off."""
    model = DistributedDataParallel(plain())
    counter = Counter(model.process_group)
    joinables: list[Joinable] = [counter, model] if counter_first else [model, counter]
    with Join(joinables, note="for the hooks", divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            if counter_first:
                counter.count()
            ddp_models.loss_of(model(torch.randn(4, 8))).backward()
            if not counter_first:
                counter.count()
    total = counter.total
    with Join(joinables, enable=False):
        counter.count()
    return total, counter.last, counter.given, counter.total - total


@scenario
def join_badly(rank: int, size: int) -> list[str]:
    """No joinables; two groups; an exception inside goes on unchanged; a warning after many shadow iterations."""
    errors = []
    world = collectives.group.WORLD
    assert isinstance(world, ProcessGroup)
    other = collectives.new_group()
    assert isinstance(other, ProcessGroup)
    for joinables in ([], [Counter(world), Counter(other)]):
        try:
            Join(list(joinables))
        except Exception as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
    try:
        with Join([Counter(world)]):
            raise ValueError("the user's own")
    except ValueError as exc:
        errors.append(str(exc))
    before, algorithms.SKEW_WARNING = algorithms.SKEW_WARNING, 2  # type: ignore[misc]
    counter = Counter(world)
    with warnings.catch_warnings(record=True) as caught, Join([counter]):
        warnings.simplefilter("always")
        for _ in range(1 + 3 * rank):
            counter.count()
    algorithms.SKEW_WARNING = before  # type: ignore[misc]
    return errors + [str(warning.message) for warning in caught]


@scenario
def two_epochs(rank: int, size: int, options: dict[str, Any], zero: str) -> list[str]:
    """Rank i has 1 + i inputs in each of two epochs; at the end of an epoch `.grad` has the rank's own gradients."""
    module: Any = torch.nn.Linear(1, 1, bias=False).double()
    model, weight = DistributedDataParallel(module, **options), module.weight
    wrong = []
    for epoch in range(2):
        expected = 0.0
        with model.join():
            for step in range(1 + rank):
                if zero == "before":
                    model.zero_grad()
                model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
                expected = (size - step) / size  # as many ranks still train
                if abs(weight.grad.item() - expected) > 1e-12:
                    wrong.append(f"rank {rank}, epoch {epoch}, step {step}: {weight.grad.item()} instead of {expected}")
                if zero == "after":
                    model.zero_grad()
        left = None if weight.grad is None else weight.grad.item()
        if (left is None) != (zero == "after") or (left is not None and abs(left - expected) > 1e-12):
            wrong.append(f"rank {rank}, epoch {epoch}: {left} was left")
    return wrong
