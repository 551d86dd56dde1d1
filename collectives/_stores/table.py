"""The table of a store as plain data: keys, queues, and who waits for what.

Rules: no threads, no event loop, no clock, no I/O. Every method changes the table at once and returns which waiters it
woke; the caller (a lock, an event loop, a file) delivers that. Invariants:

    I1  A value waiter is in the table only while at least one of its keys is missing.
    I2  A pop waiter is in the table only while its queue is empty.
    I3  A waiter is woken at most once, and all its keys were there at one instant, at which its values were read.
    I4  Pop waiters of one queue are served in the order in which they came.
    I5  An empty queue is no queue: it is removed.

Semantics are those of torch's stores, found by running them: values and queues of the same name live side by side;
queues count for `check` and `wait`, not for `num_keys`, `list_keys` and `delete_key`; `compare_set` on a missing key
writes only when an empty value was expected; `add` keeps decimal text and wraps at 64 bits.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rpcdist.errors import DistStoreError

__all__ = ["StoreTable", "Woken", "next_number"]

V = TypeVar("V")

_NUMBER = re.compile(rb"\s*([+-]?\d{1,30})")


@dataclass(frozen=True, slots=True)
class Woken:
    """A waiter that got what it waited for: `values` of its keys in their order, or the one that it popped."""

    waiter: int
    values: tuple[bytes, ...]


@dataclass(slots=True)
class _Waiter:
    id: int
    keys: tuple[str, ...]
    values_only: bool  # a `get` needs values; a `wait` is content with a queue of the name
    missing: set[str] = field(default_factory=set)


class StoreTable:
    """Keys with values, queues, and waiters. Not thread-safe: its owner serialises the calls."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._watchers: dict[str, dict[int, _Waiter]] = {}
        self._poppers: dict[str, dict[int, None]] = {}
        self._queue_of_popper: dict[int, str] = {}
        self._last_id = 0

    def __repr__(self) -> str:
        return f"<StoreTable [{len(self._values)} keys, {len(self._queues)} queues, {self.num_waiters} waiters]>"

    # ------------------------------------------------------------ values

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> list[Woken]:
        self._values[key] = value
        return self._appeared(key)

    def add(self, key: str, amount: int) -> tuple[int, list[Woken]]:
        """Adds to the number that is kept as decimal text; a missing key counts as 0.

        Raises:
            DistStoreError: the value is not a number.
        """
        number = next_number(key, self._values.get(key), amount)
        return number, self.set(key, str(number).encode())

    def append(self, key: str, value: bytes) -> list[Woken]:
        return self.set(key, self._values.get(key, b"") + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> tuple[bytes, list[Woken]]:
        """Returns what the key holds now; `expected` where the key is missing and stays so."""
        current = self._values.get(key)
        if current is None and expected:
            return expected, []
        if current is None or current == expected:
            return desired, self.set(key, desired)
        return current, []

    def delete(self, key: str) -> bool:
        if self._values.pop(key, None) is None:
            return False
        self._vanished(key)
        return True

    def has(self, key: str, values_only: bool = False) -> bool:
        return key in self._values or (not values_only and key in self._queues)

    def missing(self, keys: Iterable[str], values_only: bool = False) -> list[str]:
        """Those of `keys` that are not there, in their order."""
        return [key for key in keys if not self.has(key, values_only)]

    @property
    def num_keys(self) -> int:
        return len(self._values)

    def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    # ------------------------------------------------------------ queues

    def queue_push(self, key: str, value: bytes) -> list[Woken]:
        self._queues.setdefault(key, deque()).append(value)
        return self._appeared(key) + self._serve_poppers(key)

    def queue_restore(self, key: str, value: bytes) -> list[Woken]:
        """Puts a popped value that could not be delivered back to the front."""
        self._queues.setdefault(key, deque()).appendleft(value)
        return self._appeared(key) + self._serve_poppers(key)

    def queue_pop(self, key: str) -> bytes | None:
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
            self._vanished(key)
        return value

    def queue_first(self, key: str) -> bytes | None:
        """What `queue_pop` would return; changes nothing."""
        return self._queues[key][0] if key in self._queues else None

    def queue_len(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    # ------------------------------------------------------------ waiters

    @property
    def num_waiters(self) -> int:
        return len(self._waiters) + len(self._queue_of_popper)

    def park(self, keys: Sequence[str], values_only: bool) -> int:
        """Adds a waiter for all of `keys`, at least one of which is missing now; returns its number."""
        waiter = _Waiter(self._next_id(), tuple(keys), values_only, set(self.missing(keys, values_only)))
        assert waiter.missing, "a waiter that misses nothing would never be woken"
        self._waiters[waiter.id] = waiter
        for key in waiter.keys:
            self._watchers.setdefault(key, {})[waiter.id] = waiter
        return waiter.id

    def park_pop(self, key: str) -> int:
        """Adds a waiter for the next value of an empty queue; returns its number."""
        assert key not in self._queues, "the queue has a value to pop"
        number = self._next_id()
        self._poppers.setdefault(key, {})[number] = None
        self._queue_of_popper[number] = key
        return number

    def forget(self, number: int) -> None:
        """Removes a waiter; nothing happens when it is gone."""
        waiter = self._waiters.pop(number, None)
        if waiter is not None:
            for key in set(waiter.keys):
                _remove(self._watchers, key, number)
        elif (key_of_queue := self._queue_of_popper.pop(number, None)) is not None:
            _remove(self._poppers, key_of_queue, number)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _appeared(self, key: str) -> list[Woken]:
        woken = []
        for waiter in list(self._watchers.get(key, {}).values()):
            if self.has(key, waiter.values_only):
                waiter.missing.discard(key)
            if not waiter.missing:
                self.forget(waiter.id)
                woken.append(Woken(waiter.id, tuple(self._values.get(name, b"") for name in waiter.keys)))
        return woken

    def _vanished(self, key: str) -> None:
        for waiter in self._watchers.get(key, {}).values():
            if not self.has(key, waiter.values_only):
                waiter.missing.add(key)

    def _serve_poppers(self, key: str) -> list[Woken]:
        woken = []
        for number in list(self._poppers.get(key, ())):
            value = self.queue_pop(key)
            if value is None:
                break
            self.forget(number)
            woken.append(Woken(number, (value,)))
        return woken


def next_number(key: str, text: bytes | None, amount: int) -> int:
    """The sum that `add` stores, wrapped to a signed 64-bit number as in torch.

    Raises:
        DistStoreError: `text` does not start with a number.
    """
    match = _NUMBER.match(text) if text is not None else None
    if text is not None and match is None:
        shown = text[:40] if len(text) <= 40 else text[:40] + b"..."
        raise DistStoreError(f"cannot add to key {key!r}: its value {shown!r} is not a number")
    total = (int(match[1]) if match else 0) + amount
    return (total + 2**63) % 2**64 - 2**63


def _remove(table: dict[str, dict[int, V]], key: str, number: int) -> None:
    entries = table.get(key)
    if entries is not None:
        entries.pop(number, None)
        if not entries:
            del table[key]
