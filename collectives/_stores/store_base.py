"""The interface of every store, with torch's method names and behaviour."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import index
from typing import Final, Self, TypeVar, cast

from rpcdist.at_exit import register_at_exit
from rpcdist.collectives._stores import store_operations as operations
from rpcdist.collectives._stores.store_methods import carry_out
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, DistStoreError, QueueEmptyError, StoreTimeout, listed
from rpcdist.time_limits import STORE_TIMEOUT_S
from rpcdist.transport.credentials import Credentials

R = TypeVar("R")

Value = bytes | str | bytearray
Timeout = timedelta | float
"""A `timedelta`, or seconds."""

DEFAULT_TIMEOUT: Final = timedelta(seconds=STORE_TIMEOUT_S)
_INT64 = range(-(2**63), 2**63)


class Store:
    """Keys (text) with values (bytes) that all processes of a job see.

    Several threads may use it. A method that waits takes at most the store's `timeout`, unless it has a timeout of its
    own; then it raises `StoreTimeout`, which names the missing keys and the store, and leaves no trace in the store.
    Ctrl-C interrupts it in the main thread. `close` releases connections and files; `with` calls it.

    A new kind of store implements `execute`, `address` and `clone`. The other methods check their arguments and pass
    an operation of `rpcdist.collectives.store` to `execute`; the operation's docstring says what it returns. Or, like
    a program's own store for torch, it defines some of the methods themselves: `set`, `get` and `add` are enough for
    process groups; with `check` and `compare_set` it is faster, and safe from processes that die.
    """

    _timeout_s: float = STORE_TIMEOUT_S  # for a subclass that does not call __init__

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout_s = seconds(timeout)

    # ------------------------------------------------------------ to implement

    def execute(self, operation: operations.StoreOperation[object], deadline: Deadline) -> object:
        """Runs one operation. Several threads may call it at the same time.

        Args:
            operation: `Get`, `Wait` and `QueuePop` may have to wait; the others never wait.
            deadline: the limit of the wait for keys; after it, the store looks once. It does not limit the time that a
                network or a file takes.

        Returns:
            The result that the operation's docstring names; `Missing`, with the missing keys, after the deadline.

        Raises:
            DistStoreError: the operation failed.
        """
        return carry_out(self, operation, deadline, lambda name: getattr(type(self), name) is not getattr(Store, name))

    @property
    def address(self) -> str:
        """The place of the table, for people: host:port, a path, or similar."""
        return f"{type(self).__name__} of the program"

    def clone(self) -> Store:
        """Returns another object for the same table, with its own timeout; close both."""
        raise DistStoreError(f"{type(self).__name__} has no method clone(), which is needed here; add it to the class")

    # ------------------------------------------------------------ values

    def set(self, key: str, value: Value) -> None:
        """Sets `key`, whether it exists or not."""
        self._run(operations.Set((_text(key),), (_data(value),)))

    def get(self, key: str) -> bytes:
        """Waits for `key`, up to `timeout`, and returns its value."""
        return self._run(operations.Get((_text(key),)), self._timeout_s)[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum; a new counter starts at 0, and `get` returns it as decimal text.

        Raises:
            DistStoreError: the value of the key is not a number.
        """
        if not hasattr(amount, "__index__") or (number := index(amount)) not in _INT64:
            raise TypeError(f"add() takes a whole number of 64 bits, not {amount!r}")
        return self._run(operations.Add(_text(key), number))

    def append(self, key: str, value: Value) -> None:
        """Appends to the value of `key`; a missing value counts as empty."""
        self._run(operations.Append(_text(key), _data(value)))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Sets `key` if its value is `expected_value`, or if it is missing and `expected_value` is empty.

        Returns:
            The value after that; `expected_value` if the key is missing and was not set.
        """
        return self._run(operations.CompareSet(_text(key), _data(expected_value), _data(desired_value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys (or queues of these names) exist; does not wait."""
        return self._run(operations.Check(_texts(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until all keys (or queues of these names) exist."""
        names = _texts(keys)
        if names:
            self._run(operations.Wait(names), self._timeout_s if timeout is None else seconds(timeout))

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it existed. Queues stay."""
        return self._run(operations.DeleteKey(_text(key)))

    def num_keys(self) -> int:
        """Returns the number of keys in the whole table, with those of other prefixes, without queues."""
        return self._run(operations.NumKeys())

    def list_keys(self) -> list[str]:
        """Returns all keys (of this prefix, without the prefix), in no particular order."""
        return list(self._run(operations.ListKeys()))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all keys, up to `timeout`, and returns their values; those of our stores are of one instant."""
        names = _texts(keys)
        return list(self._run(operations.Get(names), self._timeout_s)) if names else []

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets several keys; in our stores, at one instant."""
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set() got {len(keys)} keys and {len(values)} values; give one value for each")
        if keys:
            self._run(operations.Set(_texts(keys), tuple(map(_data, values))))

    # ------------------------------------------------------------ queues

    def queue_push(self, key: str, value: Value) -> None:
        """Puts a value at the end of a queue."""
        self._run(operations.QueuePush(_text(key), _data(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Takes the first value of a queue; each value goes to one caller.

        Raises:
            QueueEmptyError: the queue is empty and `block` is false.
            StoreTimeout: no value came within `timeout`.
        """
        name, timeout_s = _text(key), self._timeout_s if block else 0.0
        value = self._execute(operations.QueuePop(name), timeout_s)
        if not isinstance(value, operations.Missing):
            return cast("bytes", value)
        if block:
            raise timed_out("queue_pop", timeout_s, [name], self.address)
        raise QueueEmptyError(f"queue is empty: {name!r} in the store at {self.address}")

    def queue_len(self, key: str) -> int:
        """Returns the number of values in a queue."""
        return self._run(operations.QueueLen(_text(key)))

    # ------------------------------------------------------------ the rest

    def _execute(self, operation: operations.StoreOperation[object], timeout_s: float) -> object:
        """Refuses operations that are too large, for every kind of store: other processes could not read the value."""
        size_bytes, most = operation.size_bytes, operations.LARGEST_BYTES
        if size_bytes > most:
            raise DistStoreError(
                f"{operation.method}() has {size_bytes} bytes of keys and values, but a store takes at most {most} "
                f"bytes ({most >> 20} MiB) in one operation. Use several keys, or a file."
            )
        return self.execute(operation, Deadline.after(timeout_s))

    def _run(self, operation: operations.StoreOperation[R], timeout_s: float = 0.0) -> R:
        result = self._execute(operation, timeout_s)
        if isinstance(result, operations.Missing):
            raise timed_out("wait", timeout_s, result.keys, self.address)
        return cast("R", result)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until `world_size` callers have reached the barrier of this name, which can be used repeatedly.

        A caller that times out has been counted, so do not use the same name again after that.
        """
        if world_size < 1:
            raise ConfigError(f"a barrier needs a world_size of at least 1, not {world_size}")
        came = self.add(f"{key}/num_members", 1)
        round_number, place = divmod(came - 1, world_size)
        done = f"{key}/last_member/{round_number}"
        if place == world_size - 1:
            self.set(done, b"1")
            if round_number:  # all have left the previous round, since they have come to this one
                self.delete_key(f"{key}/last_member/{round_number - 1}")
        self.wait([done], timeout)

    @property
    def timeout(self) -> timedelta:
        """The limit of waits without a timeout of their own."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets the limit of waits without a timeout of their own, in seconds or as a `timedelta`."""
        self._timeout_s = seconds(timeout)

    def _held(self) -> AbstractContextManager[None] | None:
        """A block in which several operations of this thread, none of which may wait, cost about as much as one; None
        if the kind of store has no such block."""
        return None

    @property
    def is_served_here(self) -> bool:
        """Whether this process serves the store to others, which lose it when this process ends."""
        return False

    def note_failure(self, reason: str) -> None:  # most stores do not serve other processes
        """Records why this process gives up, for errors of processes that lose the store it serves. Never blocks."""

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are atomic, and queues exist."""
        return type(self).execute is not Store.execute

    def full_key(self, key: str) -> str:
        """Returns the key in the table, with the prefixes of this object."""
        return key

    def close(self) -> None:  # most stores hold no resources
        """Releases the store's resources. Idempotent, bounded. No other method may be called afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.address}, timeout {self._timeout_s:g} s>"


def seconds(timeout: Timeout) -> float:
    """Returns the seconds of a timeout, 0 for negative ones. Raises `TypeError` or `ConfigError` if it is invalid."""
    if isinstance(timeout, timedelta):
        return max(0.0, timeout.total_seconds())
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"a timeout must be a datetime.timedelta or a number of seconds, not {timeout!r}")
    if not math.isfinite(timeout):
        raise ConfigError(f"the timeout of a store must be finite, not {timeout}")
    return max(0.0, float(timeout))


def timed_out(what: str, timeout_s: float, keys: Iterable[str], address: str) -> StoreTimeout:
    return StoreTimeout(
        f"{what} timeout after {round(timeout_s * 1000)}ms, keys: {listed(keys)} (missing in the store at "
        f"{address}). The process that sets them has not started, has failed, or uses another store or prefix."
    )


def _text(key: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):  # as in torch
        return key.decode()
    raise TypeError(f"a key of a store must be text, not {type(key).__name__}")


def _texts(keys: Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"expected a list of keys, but got the single key {keys!r}")
    return tuple(_text(key) for key in keys)


def _data(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    raise TypeError(f"a value of a store must be bytes or text, not {type(value).__name__}")


logger = logging.getLogger(__name__)


_dropped: Final[deque[tuple[int, Callable[[], None]]]] = deque()
"""How to close the stores that finalizers could not close, and in which process."""
_exiting = False


def close_later(pid: int, close: Callable[[], None]) -> None:
    """Schedules `close` for later, in process `pid` only (not in a forked child); safe in a finalizer."""
    _dropped.append((pid, close))
    if _exiting:  # a finalizer may run after `_close_at_exit`, when it cannot interrupt an operation
        close_dropped()


def close_dropped() -> None:
    """Closes dropped stores. Logs errors, because no caller can handle them. Any thread may call it."""
    while _dropped:
        try:
            pid, close = _dropped.popleft()
        except IndexError:  # another thread was faster
            return
        if pid == os.getpid():
            try:
                close()
            except Exception:
                logger.warning("a store that was dropped without close() could not be closed", exc_info=True)


def _close_at_exit() -> None:
    global _exiting
    _exiting = True
    close_dropped()


register_at_exit(_close_at_exit)


class SignedRecords:
    """Signed values in a store. Any thread may use it."""

    def __init__(self, store: Store, credentials: Credentials) -> None:
        self._store = store
        self._credentials = credentials

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._credentials.sign(self._store.full_key(key), value.encode()))

    def replace(self, key: str, value: str, wanted: str) -> bool:
        """Replaces the record of an existing key if it still is `value`; returns whether it was replaced."""
        full_key, found = self._store.full_key(key), self._store.get(key)
        if self._credentials.verify(full_key, found, self._store.address).decode(errors="replace") != value:
            return False
        record = self._credentials.sign(full_key, wanted.encode())
        return self._store.compare_set(key, found, record) == record

    def get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[str]:
        """Waits for all keys, up to the store's timeout or the given one; bytes that are not text become U+FFFD.

        Raises:
            AuthenticationFailed: a record was not signed by a process of the job; names its key.
            DistStoreError: a key was not set in time, or the operation failed.
        """
        if timeout_s is not None:
            self._store.wait(keys, timeout_s)
        return self.verified(keys, self._store.multi_get(keys))

    def verified(self, keys: Sequence[str], records: Sequence[bytes]) -> list[str]:
        """Returns the values of records that were read under these keys; raises as `get`."""
        place = self._store.address
        return [
            self._credentials.verify(self._store.full_key(key), record, place).decode(errors="replace")
            for key, record in zip(keys, records, strict=True)
        ]
