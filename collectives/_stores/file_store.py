"""A store in a file that several processes open, on one machine or on a shared file system with locks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from rpcdist.collectives._stores.abandoned import abandon, clean_up
from rpcdist.collectives._stores.base import DEFAULT_TIMEOUT, Store, Timeout, timed_out
from rpcdist.collectives._stores.file_log import Change, ChangeLog, Code, OpenLog
from rpcdist.collectives._stores.table import StoreTable, next_number
from rpcdist.deadline import Deadline
from rpcdist.errors import DistStoreError

__all__ = ["FileStore"]

T = TypeVar("T")

LOCK_LIMIT_S: Final = (
    30.0  # for one operation; a lock is held for microseconds, so somebody is stopped if it takes longer
)
SHORTEST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05


class FileStore(Store):
    """A store in a file. A process that is killed in the middle of a write harms nobody.

    All processes give the same path, and a new path for each job: what an earlier run left in the file would be taken
    for this one's. With a known `world_size`, the last of that many stores to be closed removes the file.

    Waiting looks at the file's size every 1 to 50 ms: a file shared between machines has no event to wait for.

    Args:
        file_name: the file; it is created, its folder has to exist.
        world_size: how many processes will use it; -1 if that is not known.
        timeout: how long methods wait that take no timeout of their own.

    Raises:
        DistStoreError: the file cannot be used.
    """

    def __init__(
        self, file_name: str | os.PathLike[str], world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__(timeout)
        clean_up()
        self._state = _State(os.path.abspath(os.fspath(file_name)), world_size)
        self._closer = weakref.finalize(self, abandon, os.getpid(), self._state.close)

    @property
    def path(self) -> str:
        return self._state.log.path

    @property
    def address(self) -> str:
        return f"file {self.path}"

    def clone(self) -> FileStore:
        """Another store object for the file; it does not count as one of the `world_size` users."""
        return FileStore(self.path, -1, self._timeout_s)

    def close(self) -> None:
        """Counts this user as gone; the last of `world_size` removes the file. Idempotent, bounded."""
        if self._closer.detach() is not None:
            self._state.close()

    # ------------------------------------------------------------ the interface

    def _read(self, look: Callable[[StoreTable], T]) -> T:
        with self._state.open(writing=False) as (table, _):
            return look(table)

    def _write(self, change: Change) -> None:
        with self._state.open(writing=True):
            self._state.change([change])

    def _set_items(self, items: Sequence[tuple[str, bytes]]) -> None:
        with self._state.open(writing=True):
            self._state.change([Change(Code.SET, key, value) for key, value in items])

    def _get_values(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        def look(table: StoreTable) -> list[bytes] | None:
            return None if table.missing(keys, values_only=True) else [table.get(key) or b"" for key in keys]

        values = self._poll(lambda: self._read(look), timeout_s)
        if values is None:
            missing = self._read(lambda table: table.missing(keys, values_only=True))
            raise timed_out("wait", timeout_s, missing or keys, self.address)
        return values

    def _wait_keys(self, keys: Sequence[str], timeout_s: float) -> None:
        if self._poll(lambda: None if self._missing(keys) else True, timeout_s) is None:
            raise timed_out("wait", timeout_s, self._missing(keys) or keys, self.address)

    def _poll(self, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        """Calls `attempt` whenever the file has grown, until it returns something or the time is over."""
        deadline = Deadline.after(timeout_s)
        pause_s = SHORTEST_PAUSE_S
        while (result := attempt()) is None and not deadline.expired():
            while not deadline.expired():
                time.sleep(min(pause_s, deadline.remaining_s()))
                pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
                if self._state.log.maybe_grown():
                    break
        return result

    def _add(self, key: str, amount: int) -> int:
        with self._state.open(writing=True) as (table, _):
            number = next_number(key, table.get(key), amount)
            self._state.change([Change(Code.SET, key, str(number).encode())])
        return number

    def _append(self, key: str, value: bytes) -> None:
        self._write(Change(Code.APPEND, key, value))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._state.open(writing=True) as (table, _):
            current = table.get(key)
            if current is None and expected:
                return expected
            if current is not None and current != expected:
                return current
            self._state.change([Change(Code.SET, key, desired)])
        return desired

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return self._read(lambda table: table.missing(keys))

    def _delete(self, key: str) -> bool:
        with self._state.open(writing=True) as (table, _):
            if table.get(key) is None:
                return False
            self._state.change([Change(Code.DELETE, key)])
        return True

    def _num_keys(self) -> int:
        return self._read(lambda table: table.num_keys)

    def _list_keys(self, prefix: str) -> list[str]:
        return self._read(lambda table: table.keys(prefix))

    def _queue_push(self, key: str, value: bytes) -> None:
        self._write(Change(Code.PUSH, key, value))

    def _queue_pop(self, key: str, timeout_s: float) -> bytes | None:
        def pop() -> bytes | None:
            if not self._read(lambda table: table.queue_len(key)):
                return None
            with self._state.open(writing=True) as (table, _):
                value = table.queue_first(key)
                if value is not None:  # nobody was faster
                    self._state.change([Change(Code.POP, key)])
            return value

        return self._poll(pop, timeout_s)

    def _queue_len(self, key: str) -> int:
        return self._read(lambda table: table.queue_len(key))


class _State:
    """The file's log and the table that it amounts to so far; apart from `FileStore`, so that it can outlive it."""

    def __init__(self, path: str, world_size: int) -> None:
        self.log = ChangeLog(path)
        self._world_size = world_size
        self._table = StoreTable()
        self._lock = threading.Lock()
        self._open_log: OpenLog | None = None
        self._num_opened = 0
        self._num_closed = 0
        self._closed = False
        self._pid = os.getpid()
        self.log.create(Deadline.after(LOCK_LIMIT_S))
        if world_size > 0:
            with self.open(writing=True):
                self.change([Change(Code.OPENED)])

    @contextmanager
    def open(self, writing: bool) -> Iterator[tuple[StoreTable, OpenLog]]:
        """Locks the file and brings the table up to date."""
        deadline = Deadline.after(LOCK_LIMIT_S)
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise DistStoreError(f"another thread has used {self.log.path} for {LOCK_LIMIT_S} s")
        try:
            if self._closed:
                raise DistStoreError(f"the store in {self.log.path} was closed by this process")
            with self.log.locked(writing, deadline) as self._open_log:
                for change in self._open_log.read():
                    self._apply(change)
                yield self._table, self._open_log
        finally:
            self._open_log = None
            self._lock.release()

    def change(self, changes: list[Change]) -> None:
        """Writes the changes and applies them; inside `open(writing=True)`."""
        assert self._open_log is not None
        self._open_log.write(changes)
        for change in changes:
            self._apply(change)

    def _apply(self, change: Change) -> None:
        match change.code:
            case Code.SET:
                self._table.set(change.key, change.value)
            case Code.APPEND:
                self._table.append(change.key, change.value)
            case Code.DELETE:
                self._table.delete(change.key)
            case Code.PUSH:
                self._table.queue_push(change.key, change.value)
            case Code.POP:
                self._table.queue_pop(change.key)
            case Code.OPENED:
                self._num_opened += 1
            case Code.CLOSED:
                self._num_closed += 1

    def close(self) -> None:
        # A forked child did not open the file, and does not count.
        if self._world_size <= 0 or self._pid != os.getpid() or not os.path.exists(self.log.path):
            self._closed = True
            return
        with self.open(writing=True) as (_, log):
            self.change([Change(Code.CLOSED)])
            self._closed = True
            if self._num_closed >= self._world_size and self._num_closed == self._num_opened:
                log.remove()
