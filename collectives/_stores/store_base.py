"""The interface of every store, with torch's method names and behaviour."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from operator import index
from types import TracebackType
from typing import Final, Self, TypeVar, cast

from rpcdist.at_exit import register_at_exit
from rpcdist.collectives._stores.store_methods import carry_out
from rpcdist.collectives._stores.store_operations import (
    LARGEST_BYTES,
    Add,
    Append,
    Check,
    CompareSet,
    DeleteKey,
    Get,
    ListKeys,
    Missing,
    NumKeys,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    StoreOperation,
    Wait,
)
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DistStoreError, QueueEmptyError, StoreTimeout, listed
from rpcdist.time_limits import STORE_TIMEOUT_S
from rpcdist.transport.credentials import Records

R = TypeVar("R")

Value = bytes | str | bytearray
Timeout = timedelta | float
"""A `timedelta`, or seconds."""

DEFAULT_TIMEOUT: Final = timedelta(seconds=STORE_TIMEOUT_S)
_INT64 = range(-(2**63), 2**63)


class Store:
    """Keys (text) with values (bytes) that all processes of a job see.

    Safe to use from several threads. A method that waits is bounded by the store's `timeout` unless it takes its own,
    raises `StoreTimeout` naming the missing keys and the store, and leaves nothing behind; Ctrl-C interrupts it in the
    main thread. `close` gives up connections and files; `with` does it by itself.

    A new kind of store implements `execute`, `address` and `clone`. The other methods check their arguments and hand
    `execute` an operation of `rpcdist.collectives.store`, whose docstring says what the operation returns. Or it has,
    as a program's own store for torch has, some of the methods themselves: `set`, `get` and `add` are enough for
    process groups; `check` and `compare_set` make it faster, and safe from processes that die.
    """

    _timeout_s: float = STORE_TIMEOUT_S  # of a class that does not call __init__

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout_s = seconds(timeout)

    # ------------------------------------------------------------ to implement

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        """Carries out one operation. It may be called from several threads at the same time.

        Args:
            operation: `Get`, `Wait` and `QueuePop` may have to wait; the others are done at once.
            deadline: until when to wait; one that has passed means to look once. It limits the wait for keys only: how
                long a network or a file may take is the store's own affair.

        Returns:
            What the operation's docstring says; `Missing`, with the missing keys, when it waited in vain.

        Raises:
            DistStoreError: the operation failed.
        """
        return carry_out(self, operation, deadline, lambda name: getattr(type(self), name) is not getattr(Store, name))

    @property
    def address(self) -> str:
        """Where the table is, for people: host:port, a path, or the like."""
        return f"{type(self).__name__} of the program"

    def clone(self) -> Store:
        """Another object for the same table, with its own timeout; close both."""
        raise DistStoreError(f"{type(self).__name__} has no method clone(), which is needed here; add it to the class")

    # ------------------------------------------------------------ values

    def set(self, key: str, value: Value) -> None:
        """Sets `key`, whether it was there or not."""
        self._run(Set((_text(key),), (_data(value),)))

    def get(self, key: str) -> bytes:
        """Waits for `key`, up to `timeout`, and returns its value."""
        return self._run(Get((_text(key),)), self._timeout_s)[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum; a new one starts at 0, and `get` returns it as decimal text.

        Raises:
            DistStoreError: the key holds something that is not a number.
        """
        if not hasattr(amount, "__index__") or (number := index(amount)) not in _INT64:
            raise TypeError(f"add() takes a whole number of 64 bits, not {amount!r}")
        return self._run(Add(_text(key), number))

    def append(self, key: str, value: Value) -> None:
        """Appends to the value of `key`; a missing one counts as empty."""
        self._run(Append(_text(key), _data(value)))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Sets `key` if it holds `expected_value`, or if it is missing and the empty value is expected.

        Returns:
            The value after that; `expected_value` when the key is missing and was not set.
        """
        return self._run(CompareSet(_text(key), _data(expected_value), _data(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys (or queues of these names) are there; does not wait."""
        return self._run(Check(_texts(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until all keys (or queues of these names) are there."""
        names = _texts(keys)
        if names:
            self._run(Wait(names), self._timeout_s if timeout is None else seconds(timeout))

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it was there. Queues stay."""
        return self._run(DeleteKey(_text(key)))

    def num_keys(self) -> int:
        """How many keys the whole table has, those of other prefixes included, queues not."""
        return self._run(NumKeys())

    def list_keys(self) -> list[str]:
        """All keys (of this prefix, without it), in no particular order."""
        return list(self._run(ListKeys()))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all keys, up to `timeout`, and returns their values as of one instant where the store is ours."""
        names = _texts(keys)
        return list(self._run(Get(names), self._timeout_s)) if names else []

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets several keys, at one instant where the store is ours."""
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set() got {len(keys)} keys and {len(values)} values; give one value for each")
        if keys:
            self._run(Set(_texts(keys), tuple(map(_data, values))))

    # ------------------------------------------------------------ queues

    def queue_push(self, key: str, value: Value) -> None:
        """Puts a value at the end of a queue."""
        self._run(QueuePush(_text(key), _data(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Takes the first value of a queue; each value goes to one caller.

        Raises:
            QueueEmptyError: it is empty and `block` is false.
            StoreTimeout: nothing came within `timeout`.
        """
        name, timeout_s = _text(key), self._timeout_s if block else 0.0
        value = self._execute(QueuePop(name), timeout_s)
        if not isinstance(value, Missing):
            return cast("bytes", value)
        if block:
            raise timed_out("queue_pop", timeout_s, [name], self.address)
        raise QueueEmptyError(f"queue is empty: {name!r} in the store at {self.address}")

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        return self._run(QueueLen(_text(key)))

    # ------------------------------------------------------------ the rest

    def _execute(self, operation: StoreOperation[object], timeout_s: float) -> object:
        """Refuses what is too large here, for every kind of store: another process could not read it."""
        size_bytes = operation.size_bytes
        if size_bytes > LARGEST_BYTES:
            raise DistStoreError(
                f"{operation.method}() of {size_bytes} bytes of keys and values is more than a store takes in one "
                f"operation, {LARGEST_BYTES} bytes ({LARGEST_BYTES >> 20} MiB). Use several keys, or a file."
            )
        return self.execute(operation, Deadline.after(timeout_s))

    def _run(self, operation: StoreOperation[R], timeout_s: float = 0.0) -> R:
        result = self._execute(operation, timeout_s)
        if isinstance(result, Missing):
            raise timed_out("wait", timeout_s, result.keys, self.address)
        return cast("R", result)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until `world_size` callers have come to the barrier of this name; it can be used again and again.

        A caller that times out has been counted: do not use the same name again after that.
        """
        if world_size < 1:
            raise ConfigError(f"a barrier needs a world_size of at least 1, not {world_size}")
        came = self.add(f"{key}/num_members", 1)
        round_number, place = divmod(came - 1, world_size)
        done = f"{key}/last_member/{round_number}"
        if place == world_size - 1:
            self.set(done, b"1")
            if round_number:  # all have left the previous round, or they would not have come to this one
                self.delete_key(f"{key}/last_member/{round_number - 1}")
        self.wait([done], timeout)

    @property
    def timeout(self) -> timedelta:
        """How long methods wait that take no timeout of their own."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets the limit of waits that name none, in seconds or as a `timedelta`."""
        self._timeout_s = seconds(timeout)

    def note_failure(self, reason: str) -> None:  # most stores have nobody to tell
        """Records why this process gives up, for processes that lose the store that it serves. Never blocks."""

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are one step each, and queues exist."""
        return type(self).execute is not Store.execute

    def full_key(self, key: str) -> str:
        """The key as the table knows it, with the prefixes of this object before it."""
        return key

    def close(self) -> None:  # a store that holds nothing has nothing to do
        """Gives up what the store holds; idempotent, bounded. Nothing else may be called after it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.address}, timeout {self._timeout_s:g} s>"


def seconds(timeout: Timeout) -> float:
    """Seconds of a timeout; negative ones count as 0. Raises `TypeError` or `ConfigError` for what is no timeout."""
    if isinstance(timeout, timedelta):
        return max(0.0, timeout.total_seconds())
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"a timeout is a datetime.timedelta or a number of seconds, not {timeout!r}")
    if not math.isfinite(timeout):
        raise ConfigError(f"the timeout of a store has to be finite, not {timeout}")
    return max(0.0, float(timeout))


def timed_out(what: str, timeout_s: float, keys: Iterable[str], address: str) -> StoreTimeout:
    """The error for keys that did not come in time."""
    return StoreTimeout(
        f"{what} timeout after {round(timeout_s * 1000)}ms, keys: {listed(keys)} (missing in the store at "
        f"{address}). The process that sets them has not started, has failed, or uses another store or prefix."
    )


def _text(key: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):  # as in torch
        return key.decode()
    raise TypeError(f"a key of a store is text, not {type(key).__name__}")


def _texts(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"expected a list of keys, not the single key {keys!r}")
    return tuple(_text(key) for key in keys)


def _data(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(f"a value of a store is bytes or text, not {type(value).__name__}")


logger = logging.getLogger(__name__)


class DroppedStores:
    """The clean-ups that are due. Any thread may use it."""

    def __init__(self) -> None:
        self._closers: deque[tuple[int, Callable[[], None]]] = deque()
        self._exiting = False

    def add(self, pid: int, close: Callable[[], None]) -> None:
        """Has `close` called later, in process `pid` only (not in a child forked from it); safe in a finalizer."""
        self._closers.append((pid, close))
        if self._exiting:  # a finalizer that runs at exit may come after `at_exit`, when nothing can be interrupted
            self.close_all()

    def close_all(self) -> None:
        """Closes dropped stores. Errors are logged, because no caller can handle them."""
        while self._closers:
            try:
                pid, close = self._closers.popleft()
            except IndexError:  # another thread was faster
                return
            if pid == os.getpid():
                try:
                    close()
                except Exception:
                    logger.warning("a store that was dropped without close() could not be closed", exc_info=True)

    def at_exit(self) -> None:
        self._exiting = True
        self.close_all()


DROPPED_STORES: Final = DroppedStores()
"""Those of this process, for its finalizers."""

register_at_exit(DROPPED_STORES.at_exit)


class SignedRecords:
    """Any thread may use it."""

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._records = records

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._records.sign(self._store.full_key(key), value.encode()))

    def replace(self, key: str, value: str, wanted: str) -> bool:
        """Replaces the record of a key if it is still the given one; whether it was. The record must be there."""
        full_key, found = self._store.full_key(key), self._store.get(key)
        if self._records.verify(full_key, found, self._store.address).decode(errors="replace") != value:
            return False
        record = self._records.sign(full_key, wanted.encode())
        return self._store.compare_set(key, found, record) == record

    def get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[str]:
        """Waits for all of them, up to the store's timeout or the one given; bytes that are no text become U+FFFD.

        Raises:
            AuthenticationFailed: a record was not signed by a process of the job; names its key.
            DistStoreError: they did not come in time, or the operation failed.
        """
        if timeout_s is not None:
            self._store.wait(keys, timeout_s)
        place = self._store.address
        return [
            self._records.verify(self._store.full_key(key), record, place).decode(errors="replace")
            for key, record in zip(keys, self._store.multi_get(keys), strict=True)
        ]
