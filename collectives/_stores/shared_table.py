"""A table that the threads and event loops of one process use together, and the store that is such a table."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT, Store, Timeout
from rpcdist.collectives._stores.store_operations import Missing, StoreOperation
from rpcdist.collectives._stores.table import StoreTable, Woken
from rpcdist.deadline import Deadline
from rpcdist.errors import DistStoreError
from rpcdist.time_limits import PARKED_LIMIT_S

__all__ = ["HashStore"]


class _Call:
    """An operation under way: its result so far, and what tells its caller that the result has changed."""

    __slots__ = ("notify", "number", "operation", "result")

    def __init__(self, operation: StoreOperation[object], notify: Callable[[], object]) -> None:
        self.operation = operation
        self.notify = notify
        self.number = 0  # of the waiter; 0 for a call that does not wait
        self.result: object = None


class SharedTable:
    """A table with the lock that guards it and the calls that wait. The lock is held for microseconds only."""

    def __init__(self) -> None:
        self._table = StoreTable()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Call] = {}
        self._closed_because = ""
        self.failure = ""
        """Why the process that serves it gives up, if it does."""

    @property
    def num_waiting(self) -> int:
        return self._table.num_waiters

    @property
    def closed(self) -> bool:
        return bool(self._closed_because)

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        """Carries out an operation on the caller's thread; `Missing` when it has waited until the deadline.

        Ctrl-C removes the waiter; a value that the operation popped at that moment goes back to its queue.

        Raises:
            DistStoreError: the table was closed, or the operation does not fit to what is there.
        """
        woken = threading.Event()
        with self._begun(operation, woken.set) as call:
            if call.number:
                woken.wait(min(deadline.remaining_s(), PARKED_LIMIT_S))
        return self._result(call)

    async def execute_on_loop(self, operation: StoreOperation[object], timeout_s: float) -> object:
        """The same for a coroutine. Cancelling it is like Ctrl-C."""
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._begun(operation, lambda: loop.call_soon_threadsafe(woken.set)) as call:
            if call.number and timeout_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(timeout_s, PARKED_LIMIT_S)):
                        await woken.wait()
        return self._result(call)

    def give_back(self, operation: StoreOperation[object], result: object) -> None:
        """Undoes an operation whose result did not reach its caller: a popped value goes back to its queue."""
        with self._lock:
            self._deliver(self._table.restore(operation, result))

    def close(self, reason: str) -> int:
        """Refuses further calls and ends those that wait with an error; returns how many waited. Idempotent."""
        with self._lock:
            self._closed_because = reason
            calls = list(self._waiting.values())
        for call in calls:
            call.notify()
        return len(calls)

    @contextmanager
    def _begun(self, operation: StoreOperation[object], notify: Callable[[], object]) -> Iterator[_Call]:
        """Carries out the operation, or parks it for the time of the `with` block."""
        call = _Call(operation, notify)
        delivered = False
        try:
            self._begin(call)
            yield call
            delivered = True
        finally:
            if call.number:
                self._end(call, delivered)

    def _begin(self, call: _Call) -> None:
        with self._lock:
            if self._closed_because:
                raise DistStoreError(self._closed_because)
            call.result, woken = self._table.execute(call.operation)
            self._deliver(woken)
            if isinstance(call.result, Missing):
                call.number = self._table.park(call.operation, call.result)
                self._waiting[call.number] = call

    def _end(self, call: _Call, delivered: bool) -> None:
        with self._lock:
            self._waiting.pop(call.number, None)
            self._table.forget(call.number)
            if not delivered:
                self._deliver(self._table.restore(call.operation, call.result))
            elif isinstance(call.result, Missing):
                call.result = call.operation.decide(self._table.contents)[0]  # some of the keys may have come

    def _deliver(self, woken: Iterable[Woken]) -> None:
        for number, result in woken:
            call = self._waiting.pop(number)
            call.result = result
            call.notify()

    def _result(self, call: _Call) -> object:
        if self._closed_because and isinstance(call.result, Missing):
            raise DistStoreError(self._closed_because)
        return call.result


class HashStore(Store):
    """A store for the threads of one process; useful in tests and for a world of one.

    Args:
        timeout: how long methods wait that take no timeout of their own.
    """

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
