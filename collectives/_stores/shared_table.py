"""The table of a store; the table with its lock, for threads and event loops of one process; and `HashStore`.

Rules of `StoreTable`: no threads, no event loop, no clock, no I/O. Every method changes the table at once and returns
the waiters that it woke; the caller notifies them. Invariants:

I1  An operation is parked only while at least one of its keys is missing, and it watches a missing key.
I2  A parked operation is woken at most once, at the first instant at which all its keys exist, with the result of
        that instant.
I3  Operations that pop from one queue are served in the order in which they were parked, after those that only
        wait for the queue to exist.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT, Store, Timeout
from rpcdist.collectives._stores.store_operations import Code, Contents, Missing, QueuePop, StoreOperation
from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import DistStoreError, refuse_pickling
from rpcdist.giving_up import check_not_given_up, wake_if_given_up
from rpcdist.time_limits import PARKED_LIMIT_S

__all__ = ["HashStore"]

_ADDING: Final = frozenset({Code.SET, Code.APPEND, Code.PUSH})


@dataclass(slots=True, eq=False)
class Waiter:
    """An operation that may have to wait for keys.

    Attributes:
        notify: called by the owner of the table when `result` has changed after the operation was parked.
        result: `Missing`, until the operation is done.
        was_parked: whether it had to wait.
        missing: keys that were missing; the last one is looked at, and when all have come, all keys are.
    """

    operation: StoreOperation[object]
    notify: Callable[[], object]
    result: object = None
    was_parked: bool = False
    missing: list[str] = field(default_factory=list)

    @property
    def pops(self) -> bool:
        return isinstance(self.operation, QueuePop)


class StoreTable:
    """Keys with values, queues, and waiters. Not thread-safe: its owner serialises the calls.

    Attributes:
        waiters: the parked operations, as an ordered set.
    """

    def __init__(self) -> None:
        self.contents = Contents()
        self.waiters: dict[Waiter, None] = {}
        self._watching: dict[str, dict[Waiter, None]] = {}

    def execute(self, operation: StoreOperation[object]) -> tuple[object, list[Waiter]]:
        """Runs an operation; the result is `Missing` if the operation must wait."""
        result, changes = operation.decide(self.contents)
        for change in changes:
            self.contents.apply(change)
        return result, [woken for change in changes if change.code in _ADDING for woken in self._appeared(change.key)]

    def park(self, waiter: Waiter, missing: Missing) -> None:
        waiter.result, waiter.was_parked, waiter.missing = missing, True, list(missing.keys)
        self.waiters[waiter] = None
        self._watch(waiter)

    def forget(self, waiter: Waiter) -> None:
        """Removes a waiter, if it is still parked."""
        if waiter in self.waiters:
            del self.waiters[waiter]
            self._unwatch(waiter)

    def restore(self, operation: StoreOperation[object], result: object) -> list[Waiter]:
        """Puts a popped value whose caller is gone back to the front of its queue; drops other results."""
        if not isinstance(operation, QueuePop) or not isinstance(result, bytes):
            return []
        self.contents.queues.setdefault(operation.key, deque()).appendleft(result)
        return self._appeared(operation.key)

    def _appeared(self, key: str) -> list[Waiter]:
        woken: list[Waiter] = []
        for waiter in sorted(self._watching.get(key, ()), key=lambda waiter: waiter.pops):
            self._unwatch(waiter)
            while waiter.missing and not self.contents.without_value_or_queue(waiter.missing[-1:]):
                waiter.missing.pop()
            result, others = (None, []) if waiter.missing else self.execute(waiter.operation)
            if isinstance(result, Missing):  # some were deleted meanwhile
                waiter.missing = list(result.keys)
            if waiter.missing:
                self._watch(waiter)
            else:
                del self.waiters[waiter]
                waiter.result = result
                woken += [waiter, *others]
        return woken

    def _watch(self, waiter: Waiter) -> None:
        # Keys are usually set in the order in which they are requested, by rank, so watch the last one.
        self._watching.setdefault(waiter.missing[-1], {})[waiter] = None

    def _unwatch(self, waiter: Waiter) -> None:
        watching = self._watching[waiter.missing[-1]]
        del watching[waiter]
        if not watching:
            del self._watching[waiter.missing[-1]]


class SharedTable:
    """A table, and its lock, which is held for microseconds only."""

    def __init__(self) -> None:
        self._table = StoreTable()
        self._lock = threading.Lock()
        self._closed_because = ""
        self.failure = ""
        """The error of the serving process, if it gives up."""

    @property
    def num_waiting(self) -> int:
        return len(self._table.waiters)

    @property
    def closed(self) -> bool:
        return bool(self._closed_because)

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        """Runs an operation on the caller's thread; returns `Missing` if it has waited until the deadline.

        Ctrl-C removes the waiter, and puts a value that the operation has just popped back to its queue.
        """
        woken = threading.Event()
        with self._begun(operation, woken.set) as call:
            if call.was_parked:
                wake_if_given_up(woken.set)
                limit = deadline.earlier(Deadline.after(PARKED_LIMIT_S))
                while not woken.wait(min(limit.remaining_s(), longest_sleep_s())) and not limit.expired():
                    pass  # [Note: lost Ctrl-C]
                check_not_given_up()
        return self._result(call)

    async def execute_on_loop(self, operation: StoreOperation[object], timeout_s: float) -> object:
        """Like `execute`, for a coroutine. Cancellation has the effect of Ctrl-C."""
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._begun(operation, lambda: loop.call_soon_threadsafe(woken.set)) as call:
            if call.was_parked and timeout_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(timeout_s, PARKED_LIMIT_S)):
                        await woken.wait()
        return self._result(call)

    def give_back(self, operation: StoreOperation[object], result: object) -> None:
        """Puts a popped value back to its queue if the result did not reach the caller."""
        with self._lock:
            _notify(self._table.restore(operation, result))

    def close(self, reason: str) -> int:
        """Refuses further calls and fails those that wait; returns how many waited. Idempotent."""
        with self._lock:
            self._closed_because = reason
            calls = list(self._table.waiters)
        _notify(calls)
        return len(calls)

    @contextmanager
    def _begun(self, operation: StoreOperation[object], notify: Callable[[], object]) -> Iterator[Waiter]:
        """Runs the operation, or parks it during the `with` block."""
        call = Waiter(operation, notify)
        delivered = False
        try:
            with self._lock:
                if self._closed_because:
                    raise DistStoreError(self._closed_because)
                call.result, woken = self._table.execute(operation)
                _notify(woken)
                if isinstance(call.result, Missing):
                    self._table.park(call, call.result)
            yield call
            delivered = True
        finally:
            if call.was_parked:
                self._end(call, delivered)

    def _end(self, call: Waiter, delivered: bool) -> None:
        with self._lock:
            self._table.forget(call)
            if not delivered:
                _notify(self._table.restore(call.operation, call.result))
            elif isinstance(call.result, Missing):
                call.result = call.operation.decide(self._table.contents)[0]  # some of the keys may have been set

    def _result(self, call: Waiter) -> object:
        if self._closed_because and isinstance(call.result, Missing):
            raise DistStoreError(self._closed_because)
        return call.result


def _notify(woken: Iterable[Waiter]) -> None:
    for waiter in woken:
        waiter.notify()


class HashStore(Store):
    """A store for the threads of one process, for tests and worlds of size 1.

    Args:
        timeout: the limit of waits without a timeout of their own.
    """

    __reduce_ex__ = refuse_pickling

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._table = SharedTable()

    @property
    def address(self) -> str:
        return "this process's memory"

    def clone(self) -> HashStore:
        twin = HashStore(self._timeout_s)
        twin._table = self._table
        return twin

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        return self._table.execute(operation, deadline)
