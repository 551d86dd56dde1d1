"""The table of a store: its contents, and the operations that wait for keys.

Rules: no threads, no event loop, no clock, no I/O. Every method changes the table at once and returns which waiters it
woke; the caller delivers that. Invariants:

    I1  An operation is parked only while at least one of its keys is missing, and it watches one that is.
    I2  A parked operation is woken at most once, at the first instant at which all its keys are there, with the result
        of that instant.
    I3  Operations that pop from one queue are served in the order in which they were parked, after those that only
        wait for the queue to be there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rpcdist.collectives._stores.store_operations import Change, Code, Contents, Missing, QueuePop, StoreOperation

_ADDING: Final = frozenset({Code.SET, Code.APPEND, Code.PUSH})


Woken = tuple[int, object]
"""The number of a waiter whose operation was carried out, and the operation's result."""


@dataclass(slots=True)
class _Waiter:
    number: int
    operation: StoreOperation[object]
    watched: str  # the missing key that is looked at; when it comes, the operation is tried again

    @property
    def pops(self) -> bool:
        return isinstance(self.operation, QueuePop)


class StoreTable:
    """Keys with values, queues, and waiters. Not thread-safe: its owner serialises the calls."""

    def __init__(self) -> None:
        self.contents = Contents()
        self._waiters: dict[int, _Waiter] = {}
        self._watching: dict[str, dict[int, _Waiter]] = {}
        self._last_number = 0

    @property
    def num_waiters(self) -> int:
        return len(self._waiters)

    def execute(self, operation: StoreOperation[object]) -> tuple[object, list[Woken]]:
        """Carries out an operation that can be done now; the result is `Missing` for one that has to wait.

        Raises:
            DistStoreError: the operation does not fit to what is there; nothing has changed.
        """
        result, changes = operation.decide(self.contents)
        return result, self._commit(changes)

    def park(self, operation: StoreOperation[object], missing: Missing) -> int:
        """Adds a waiter for an operation of which `missing` was just the result; returns the waiter's number."""
        self._last_number += 1
        waiter = self._waiters[self._last_number] = _Waiter(self._last_number, operation, missing.keys[-1])
        self._watch(waiter, missing)
        return waiter.number

    def forget(self, number: int) -> None:
        """Removes a waiter; nothing happens when it is gone."""
        waiter = self._waiters.pop(number, None)
        if waiter is not None:
            self._unwatch(waiter)

    def restore(self, operation: StoreOperation[object], result: object) -> list[Woken]:
        """Puts a popped value, whose caller is gone, back to the front of its queue; other results are dropped."""
        if not isinstance(operation, QueuePop) or not isinstance(result, bytes):
            return []
        self.contents.queues.setdefault(operation.key, deque()).appendleft(result)
        return self._appeared(operation.key)

    def _commit(self, changes: Iterable[Change]) -> list[Woken]:
        for change in changes:
            self.contents.apply(change)
        return [woken for change in changes if change.code in _ADDING for woken in self._appeared(change.key)]

    def _appeared(self, key: str) -> list[Woken]:
        woken: list[Woken] = []
        for waiter in sorted(self._watching.get(key, {}).values(), key=lambda waiter: waiter.pops):
            result, others = self.execute(waiter.operation)
            if isinstance(result, Missing):
                self._watch(waiter, result)
            else:
                self.forget(waiter.number)
                woken += [(waiter.number, result), *others]
        return woken

    def _watch(self, waiter: _Waiter, missing: Missing) -> None:
        # Keys usually come in the order in which they are asked for, by rank: so the last is the one to watch.
        if missing.keys[-1] != waiter.watched:
            self._unwatch(waiter)
            waiter.watched = missing.keys[-1]
        self._watching.setdefault(waiter.watched, {})[waiter.number] = waiter

    def _unwatch(self, waiter: _Waiter) -> None:
        watching = self._watching[waiter.watched]
        del watching[waiter.number]
        if not watching:
            del self._watching[waiter.watched]
