"""A store in a file that several processes open, on one machine or on a shared file system with locks."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rpcdist.collectives._stores.file_log import ChangeLog, OpenLog
from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT, DROPPED_STORES, Store, Timeout
from rpcdist.collectives._stores.store_operations import Change, Code, Contents, Missing, StoreOperation
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import DistStoreError
from rpcdist.time_limits import POLL_S, SLOW_ANSWER_LIMIT_S, TICK_S

__all__ = ["FileStore"]


class FileStore(Store):
    """A store in a file. A process that is killed in the middle of a write harms nobody.

    All processes give the same path, and a new path for each job: keys that an earlier run left in the file would be
    taken for this one's. With a known `world_size`, the last of that many stores to be closed, or dropped, removes the
    file. A process that is killed leaves it.

    Waiting reads the file's size after random pauses of at most 50 ms: a file shared between machines has no events.

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
        DROPPED_STORES.close_all()
        self._state = _FileState(os.path.abspath(os.fspath(file_name)), world_size)
        self._closer = weakref.finalize(self, _drop, os.getpid(), self._state)

    @property
    def path(self) -> str:
        """The file that holds the store."""
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

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        pauses = backoff(POLL_S, TICK_S, deadline)
        while isinstance(result := self._state.execute(operation), Missing) and not deadline.expired():
            while not deadline.expired():
                time.sleep(next(pauses))
                if self._state.log.maybe_grown():
                    break
        return result


def _drop(pid: int, state: _FileState) -> None:
    """The store is gone. A finalizer may run in the middle of an operation on this file, so it does not wait."""
    try:
        state.close(limit_s=0.0)
    except DistStoreError:
        DROPPED_STORES.add(pid, state.close)


class _FileState:
    """The file's log and the contents that it amounts to so far; apart from `FileStore`, so that it can outlive it."""

    def __init__(self, path: str, world_size: int) -> None:
        self.log = ChangeLog(path)
        self._world_size = world_size
        self._contents = Contents()
        self._lock = threading.Lock()
        self._num_opened = 0
        self._num_closed = 0
        self._closed = False
        self._pid = os.getpid()
        self.log.create(Deadline.after(SLOW_ANSWER_LIMIT_S))
        if world_size > 0:
            with self._open(writing=True) as log:
                self._change(log, [Change(Code.OPENED)])

    def execute(self, operation: StoreOperation[object]) -> object:
        """Carries out an operation with the file locked; `Missing` when it has to wait."""
        with self._open(writing=not operation.read_only) as log:
            result, changes = operation.decide(self._contents)
            if changes:
                self._change(log, changes)
            return result

    @contextmanager
    def _open(self, writing: bool, limit_s: float | None = None) -> Iterator[OpenLog]:
        """Locks the file and brings the contents up to date."""
        limit_s = SLOW_ANSWER_LIMIT_S if limit_s is None else limit_s
        deadline = Deadline.after(limit_s)
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise DistStoreError(f"another thread has used {self.log.path} for {limit_s} s")
        try:
            if self._closed:
                raise DistStoreError(f"the store in {self.log.path} was closed by this process")
            with self.log.locked(writing, deadline) as log:
                self._apply(log.read())
                yield log
        finally:
            self._lock.release()

    def _change(self, log: OpenLog, changes: Sequence[Change]) -> None:
        """Writes the changes first and then applies them: a full disk leaves file and contents as they were."""
        log.write(changes)
        self._apply(changes)

    def _apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._contents.apply(change)
            self._num_opened += change.code is Code.OPENED
            self._num_closed += change.code is Code.CLOSED

    def close(self, limit_s: float | None = None) -> None:
        # A forked child did not open the file, and does not count.
        if self._world_size <= 0 or self._pid != os.getpid() or not os.path.exists(self.log.path):
            self._closed = True
            return
        with self._open(writing=True, limit_s=limit_s) as log:
            self._change(log, [Change(Code.CLOSED)])
            self._closed = True
            if self._num_closed >= self._world_size and self._num_closed == self._num_opened:
                log.remove()
