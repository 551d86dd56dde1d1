"""A store in the memory of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rpcdist.collectives._stores.base import DEFAULT_TIMEOUT, Store, Timeout, timed_out
from rpcdist.collectives._stores.table import StoreTable, Woken

__all__ = ["HashStore"]

T = TypeVar("T")


class _Shared:
    """A table, the lock that guards it, and what the sleeping threads wait on."""

    def __init__(self) -> None:
        self.table = StoreTable()
        self.lock = threading.Lock()
        self.sleepers: dict[int, _Sleeper] = {}


class _Sleeper:
    __slots__ = ("event", "values")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.values: tuple[bytes, ...] | None = None


class HashStore(Store):
    """A store for the threads of one process; useful in tests and for a world of one.

    Args:
        timeout: how long methods wait that take no timeout of their own.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._shared = _Shared()

    @property
    def address(self) -> str:
        return "this process's memory"

    def clone(self) -> HashStore:
        twin = HashStore(self._timeout_s)
        twin._shared = self._shared
        return twin

    # ------------------------------------------------------------ locking

    def _change(self, change: Callable[[StoreTable], tuple[T, list[Woken]]]) -> T:
        with self._shared.lock:
            result, woken = change(self._shared.table)
            self._wake(woken)
        return result

    def _wake(self, woken: list[Woken]) -> None:
        for each in woken:
            sleeper = self._shared.sleepers.pop(each.waiter)
            sleeper.values = each.values
            sleeper.event.set()

    def _sleep(self, number: int, sleeper: _Sleeper, timeout_s: float, queue: str | None) -> tuple[bytes, ...] | None:
        """Waits until waiter `number` is woken; None when the time is over. `queue` names the queue it pops from."""
        delivered = False
        try:
            sleeper.event.wait(timeout_s)
            delivered = True
        finally:
            with self._shared.lock:
                self._shared.sleepers.pop(number, None)
                self._shared.table.forget(number)
                if not delivered and queue is not None and sleeper.values is not None:
                    # Ctrl-C came between the hand-over and our waking up: the value must not get lost.
                    self._wake(self._shared.table.queue_restore(queue, sleeper.values[0]))
        return sleeper.values

    # ------------------------------------------------------------ the interface

    def _set_items(self, items: Sequence[tuple[str, bytes]]) -> None:
        with self._shared.lock:
            for key, value in items:
                self._wake(self._shared.table.set(key, value))

    def _await(self, what: str, keys: Sequence[str], timeout_s: float, values_only: bool) -> list[bytes]:
        table = self._shared.table
        with self._shared.lock:
            missing = table.missing(keys, values_only)
            if not missing:
                return [table.get(key) or b"" for key in keys]
            if timeout_s > 0:
                number = table.park(keys, values_only)
                sleeper = self._shared.sleepers[number] = _Sleeper()
        values = self._sleep(number, sleeper, timeout_s, None) if timeout_s > 0 else None
        if values is None:
            raise timed_out(what, timeout_s, self._missing(keys) or missing, self.address)
        return list(values)

    def _get_values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        return self._await("wait", keys, timeout_s, True)

    def _wait_keys(self, keys: Sequence[str], timeout_s: float) -> None:
        self._await("wait", keys, timeout_s, False)

    def _queue_pop(self, key: str, timeout_s: float) -> bytes | None:
        table = self._shared.table
        with self._shared.lock:
            value = table.queue_pop(key)
            if value is not None or timeout_s <= 0:
                return value
            number = table.park_pop(key)
            sleeper = self._shared.sleepers[number] = _Sleeper()
        values = self._sleep(number, sleeper, timeout_s, key)
        return None if values is None else values[0]

    def _add(self, key: str, amount: int) -> int:
        return self._change(lambda table: table.add(key, amount))

    def _append(self, key: str, value: bytes) -> None:
        self._change(lambda table: (None, table.append(key, value)))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._change(lambda table: table.compare_set(key, expected, desired))

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return self._change(lambda table: (table.missing(keys), []))

    def _delete(self, key: str) -> bool:
        return self._change(lambda table: (table.delete(key), []))

    def _num_keys(self) -> int:
        return self._change(lambda table: (table.num_keys, []))

    def _list_keys(self, prefix: str) -> list[str]:
        return self._change(lambda table: (table.keys(prefix), []))

    def _queue_push(self, key: str, value: bytes) -> None:
        self._change(lambda table: (None, table.queue_push(key, value)))

    def _queue_len(self, key: str) -> int:
        return self._change(lambda table: (table.queue_len(key), []))
