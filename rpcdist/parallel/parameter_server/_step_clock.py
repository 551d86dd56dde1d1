"""Which trainer may take its next step: nobody is more than `staleness` steps ahead of the slowest one.

Pure: no lock, no thread, no clock of the machine. Each server has one, and they must not wait for each other:

 1. Steps have numbers, which a trainer gives them. One that begins gets `floor` of the first server, and counts from
    there. So a step has one number on all servers, wherever it arrives first.
 2. `floor` is the lowest step of those that take part, and never falls. A step is answered once it is at most
    `floor + staleness`: it waits for lower numbers only, so of all trainers the slowest one is answered everywhere.
 3. With a staleness of 0 there are rounds: those that take part arrive with one number, then all go on.
 4. Who leaves or dies no longer holds anybody. The same number may arrive again, of a call that was given up or of a
    process that was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class StepClock(Generic[T]):
    """Counts the steps of each trainer; a stale synchronous parallel clock (Ho and others, 2013).

    Args:
        trainers: those that take part from the beginning, by name.
        staleness: steps that a trainer may be ahead of the slowest one.

    Attributes:
        floor: all that take part have taken so many steps.
    """

    def __init__(self, trainers: Iterable[str], staleness: int) -> None:
        self.floor = 0
        self._staleness = staleness
        self._steps = dict.fromkeys(trainers, 0)
        self._waiting: list[tuple[int, T]] = []

    def __contains__(self, trainer: str) -> bool:
        return trainer in self._steps

    def arrive(self, trainer: str, step: int, ticket: T, takes_part: bool = True) -> list[T]:
        """A trainer has taken a step, and may take the next one when its ticket is returned, now or later.

        Args:
            trainer: its name.
            step: the number of the step.
            ticket: anything that stands for its call.
            takes_part: whether the others wait for the trainer from now on.

        Returns:
            The tickets of those that may go on.
        """
        if takes_part:
            self._steps[trainer] = step
        self._waiting.append((step, ticket))
        return self._released()

    def remove(self, trainer: str) -> list[T]:
        """A trainer left or died. Returns the tickets of those that may go on without it."""
        self._steps.pop(trainer, None)
        return self._released()

    def slowest(self) -> dict[str, int]:
        """The trainers for which others wait, with their steps; empty while nobody waits."""
        if not self._waiting:
            return {}
        return {trainer: step for trainer, step in self._steps.items() if step == self.floor}

    def _released(self) -> list[T]:
        newest = max((step for step, _ in self._waiting), default=self.floor)  # where nobody takes part
        self.floor = max(self.floor, min(self._steps.values(), default=newest))
        limit = self.floor + self._staleness
        free = [ticket for step, ticket in self._waiting if step <= limit]
        self._waiting = [(step, ticket) for step, ticket in self._waiting if step > limit]
        return free
