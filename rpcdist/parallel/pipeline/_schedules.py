"""Schedules as data: the order in which each worker runs the forwards and backwards of its stages.

A schedule is a list of actions per worker. A worker executes its list in order, and each action waits only for the
tensors that it needs. Stage `s` is on worker `s % num_workers`, so the stages of a worker are `num_workers` apart.

All functions are pure: no tensors, no clock, no network. Every schedule satisfies:
 1. Every stage and micro-batch has exactly one forward and one backward, on the worker of the stage.
 2. The lists can be executed without deadlock (`rpcdist.parallel.pipeline._simulation` checks it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from rpcdist.errors import ConfigError

Kind = Literal["F", "B"]
KINDS: Final[tuple[Kind, ...]] = ("F", "B")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One forward or backward of one micro-batch through one stage; prints as `2F0`: stage, kind, micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    __repr__ = __str__

    @property
    def words(self) -> str:
        """Returns the text for messages: "backward of micro-batch 0"."""
        return f"{'forward' if self.kind == 'F' else 'backward'} of micro-batch {self.microbatch}"


Schedule = list[list[Action]]


def parse_action(text: str) -> Action:
    """Returns the action that prints as `text`. Raises `ConfigError`."""
    found = re.fullmatch(r"\s*(\d+)([FB])(\d+)\s*", text)
    if found is None:
        raise ConfigError(f"{text!r} is not an action: write the stage, F or B, and the micro-batch, as in '2F0'")
    return Action(int(found[1]), cast(Kind, found[2]), int(found[3]))


def schedule(name: str, num_workers: int, num_microbatches: int, stages_per_worker: int = 1) -> Schedule:
    """Returns the actions of every worker, in order.

    Args:
        name: "gpipe" (all forwards, then all backwards: Huang et al., 2019), "1f1b" (one forward, one backward: a
            stage keeps at most as many micro-batches as there are stages from it to the end: Narayanan et al., 2019),
            or "interleaved" (1F1B with several stages per worker, whose bubble is smaller by that factor: Narayanan et
            al., 2021).
        num_microbatches: number of micro-batches in a batch.
        stages_per_worker: number of stages on each worker. "1f1b" allows only one; "gpipe" runs all micro-batches
            through one stage before the next stage.

    Raises:
        ConfigError: the schedule does not exist, or does not support these numbers.
    """
    for what, number in (
        ("num_workers", num_workers),
        ("num_microbatches", num_microbatches),
        ("stages_per_worker", stages_per_worker),
    ):
        if number < 1:
            raise ConfigError(f"{what}={number}: must be at least 1")
    make = SCHEDULES.get(name.lower())
    if make is None:
        raise ConfigError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return [make(worker, num_workers, num_microbatches, stages_per_worker) for worker in range(num_workers)]


def _gpipe(worker: int, num_workers: int, num_microbatches: int, stages_per_worker: int) -> list[Action]:
    stages = [worker + local * num_workers for local in range(stages_per_worker)]
    forwards = [Action(stage, "F", part) for stage in stages for part in range(num_microbatches)]
    backwards = [Action(stage, "B", part) for stage in reversed(stages) for part in range(num_microbatches)]
    return forwards + backwards


def _one_forward_one_backward(
    worker: int, num_workers: int, num_microbatches: int, stages_per_worker: int
) -> list[Action]:
    if stages_per_worker != 1:
        raise ConfigError(
            f"the schedule '1f1b' has one stage per worker, not {stages_per_worker}; choose 'interleaved', or as many "
            "workers as stages"
        )
    forwards = [Action(worker, "F", part) for part in range(num_microbatches)]
    backwards = [Action(worker, "B", part) for part in range(num_microbatches)]
    return _alternate(forwards, backwards, num_warmup=num_workers - 1 - worker)


def _interleaved(worker: int, num_workers: int, num_microbatches: int, stages_per_worker: int) -> list[Action]:
    """Rounds of about `num_workers` micro-batches go through all stages of a worker before the next round begins."""
    num_rounds = max(1, num_microbatches // num_workers)
    if num_microbatches % num_rounds:
        raise ConfigError(
            f"the schedule 'interleaved' needs rounds of equal size: {num_microbatches} micro-batches on {num_workers} "
            f"workers would make {num_rounds} unequal ones; take a multiple of {num_workers}"
        )
    round_size = num_microbatches // num_rounds
    order = [
        (local, part)
        for start in range(0, num_microbatches, round_size)
        for local in range(stages_per_worker)
        for part in range(start, start + round_size)
    ]
    forwards = [Action(worker + local * num_workers, "F", part) for local, part in order]
    last = stages_per_worker - 1
    backwards = [Action(worker + (last - local) * num_workers, "B", part) for local, part in order]
    # The first backward comes after the first round has passed all stages; for each worker before the last, one more
    # forward and one more backward come in between.
    num_warmup = (stages_per_worker - 1) * round_size + 2 * (num_workers - 1 - worker)
    return _alternate(forwards, backwards, num_warmup)


def _alternate(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    """Returns warm-up forwards, then alternating forwards and backwards, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - num_warmup :]


SCHEDULES: Final[dict[str, Callable[[int, int, int, int], list[Action]]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
}
"""The schedules by name; each function makes the actions of one worker."""


def forward_only(actions: Sequence[Sequence[Action]]) -> Schedule:
    """Returns the forwards of a schedule, which can be executed if the schedule can, as they wait only for forwards."""
    return [[action for action in row if action.kind == "F"] for row in actions]


def check_complete(actions: Sequence[Sequence[Action]], num_stages: int, num_microbatches: int) -> list[str]:
    """Describes the violations of rule 1; empty for a schedule that satisfies it."""
    problems = []
    wanted = {
        Action(stage, kind, part) for stage in range(num_stages) for part in range(num_microbatches) for kind in KINDS
    }
    seen: set[Action] = set()
    for worker, row in enumerate(actions):
        for action in row:
            if action not in wanted:
                problems.append(f"{action} is not among {num_stages} stages and {num_microbatches} micro-batches")
            elif action.stage % len(actions) != worker:
                problems.append(f"{action} is on worker {worker}, but its stage is on {action.stage % len(actions)}")
            elif action in seen:
                problems.append(f"{action} occurs twice")
            seen.add(action)
    return problems + [f"{action} is missing" for action in sorted(wanted - seen)]
