"""A store in a file that several processes open, on one machine or on a shared file system with locks.

The file is an append-only log of changes that survives the death of a writer at any byte. Format: 8 bytes of magic and
8 random bytes, which distinguish a new file from an old one of the same name; then records. A record is 4 bytes of
length, 4 bytes of CRC-32 and a body, all little endian. A body is one or more changes, each a code byte, two 4-byte
lengths, a key and a value. Readers see all changes of a record or none.

Rules: writers hold an exclusive lock on the file and readers a shared lock, so no process reads while another writes.
The kernel releases the lock of a process that dies. If it has written a part of a record, readers stop before that
part, and the next writer cuts it off.

[Note: flock per operation] The lock is `flock` on a descriptor that is opened for one operation. POSIX record locks
belong to the process and vanish when any of its descriptors for the file is closed; and a forked child would inherit a
descriptor that stays open, and would continue to hold the lock of a parent that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT, Store, Timeout, close_dropped, close_later
from rpcdist.collectives._stores.store_operations import Change, Code, Contents, Missing, StoreOperation
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import DistStoreError, on_error
from rpcdist.giving_up import pause
from rpcdist.own_shortage import own_shortage
from rpcdist.private_files import why_not_private
from rpcdist.time_limits import LOCK_FIRST_PAUSE_S, LOCK_LONGEST_PAUSE_S, POLL_S, SLOW_ANSWER_LIMIT_S, TICK_S

MAGIC: Final = b"RPCDSTR1"
HEADER_BYTES: Final = 16
MAX_RECORD_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 20

_RECORD = struct.Struct("<II")
_CHANGE = struct.Struct("<BII")
_RECORD_BYTES, _CHANGE_BYTES = _RECORD.size, _CHANGE.size
_read_record, _read_change = _RECORD.unpack_from, _CHANGE.unpack_from
_SET, _OPENED, _CLOSED = int(Code.SET), int(Code.OPENED), int(Code.CLOSED)


class FileTable:
    """The file, how much of it was read, and its contents so far; separate from `FileStore`, so that it can outlive it.

    Any thread may use it.
    """

    def __init__(self, path: str, world_size: int = -1) -> None:
        self.path = path
        self.contents = Contents()
        self._world_size = world_size
        self._lock = threading.RLock()
        self._num_opened = 0
        self._num_closed = 0
        self._closed = False
        self._pid = os.getpid()
        self._offset = HEADER_BYTES
        self._header = b""
        self._descriptor = -1  # of the file, while this process has locked it
        self._create(Deadline.after(SLOW_ANSWER_LIMIT_S))

    def execute(self, operation: StoreOperation[object]) -> object:
        """Runs an operation with the file locked; returns `Missing` if the operation must wait."""
        with self.locked(writing=not operation.read_only):
            result, changes = operation.decide(self.contents)
            if changes:
                self.change(changes)
            return result

    def still_lacks(self, operation: StoreOperation[object]) -> Missing | None:
        """Returns `Missing` if an operation that only reads had to wait and must wait; costs one `stat`."""
        with self._lock:
            if not operation.read_only or self._closed:
                return None
            result = operation.decide(self.contents)[0]
            return result if isinstance(result, Missing) and not self.maybe_grown() else None

    def close(self, limit_s: float | None = None) -> None:
        # A forked child did not open the file, and does not count.
        if self._world_size <= 0 or self._pid != os.getpid() or not os.path.exists(self.path):
            self._closed = True
            return
        with self.locked(writing=True, limit_s=limit_s):
            self.change([Change(Code.CLOSED)])
            self._closed = True
            if self._num_closed >= self._world_size and self._num_closed == self._num_opened:
                os.unlink(self.path)

    # ------------------------------------------------------------ the file

    def _create(self, deadline: Deadline) -> None:
        """Opens the file, and makes it if it is missing or empty.

        Raises:
            DistStoreError: other users can write to it.
        """
        with _system_errors(self.path):
            self._descriptor = descriptor = self._open(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, deadline)
            try:
                self._check_ours(descriptor)
                header = os.pread(descriptor, HEADER_BYTES, 0)
                if not MAGIC.startswith(header[: len(MAGIC)]):
                    raise DistStoreError(f"{self.path} exists, but is not the file of a store; use another path")
                if len(header) < HEADER_BYTES:  # new, or the process that made it was killed
                    header = MAGIC + os.urandom(HEADER_BYTES - len(MAGIC))
                    _write_all(descriptor, header, 0)
                self._header = header
                if self._world_size > 0:
                    self._apply(self._read())
                    self.change([Change(Code.OPENED)])
            finally:
                self._close_file()

    def _check_ours(self, descriptor: int) -> None:
        """Raises if other users could have written to the file, since this process trusts its content."""
        found = os.fstat(descriptor)
        if not found.st_size and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)  # the file is still empty
            return
        why = why_not_private(found, may_be_read=True)
        if why is not None:
            raise DistStoreError(
                f"{self.path} {why}. Use a path in a folder of your own, or `chmod 600 {self.path}` if you trust its "
                "content"
            )

    @contextmanager
    def locked(self, writing: bool, limit_s: float | None = None) -> Iterator[None]:
        """Opens the file, locks it for the `with` block, and updates the contents; within another such block it does
        nothing, which must be one for writing if this one is."""
        limit_s = SLOW_ANSWER_LIMIT_S if limit_s is None else limit_s
        deadline = Deadline.after(limit_s)
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise DistStoreError(f"another thread has used {self.path} for {limit_s} s")
        try:
            if self._descriptor >= 0:
                yield
                return
            if self._closed:
                raise DistStoreError(f"the store in {self.path} was closed by this process")
            with _system_errors(self.path):
                self._descriptor = self._open(os.O_RDWR, fcntl.LOCK_EX if writing else fcntl.LOCK_SH, deadline)
                try:
                    header, size = os.pread(self._descriptor, HEADER_BYTES, 0), os.fstat(self._descriptor).st_size
                    if header != self._header or size < self._offset:
                        raise DistStoreError(f"{self.path} was replaced or cut short while a store used it")
                    if size > self._offset:
                        self._apply_new()
                    yield
                finally:
                    self._close_file()
        finally:
            self._lock.release()

    def maybe_grown(self) -> bool:
        """Whether the file may have new records; costs one `stat`."""
        with _system_errors(self.path):
            return os.stat(self.path).st_size != self._offset

    def _open(self, flags: int, mode: int, deadline: Deadline) -> int:
        """Returns a descriptor of the file with a lock; closing it frees the lock."""
        descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        with on_error(partial(os.close, descriptor)):
            self._wait_for_lock(descriptor, mode, deadline)
        return descriptor

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _wait_for_lock(self, descriptor: int, mode: int, deadline: Deadline) -> None:
        # flock() has no time limit, so this tries repeatedly; a lock is held for some microseconds.
        pauses: Iterator[float] | None = None
        while True:
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                return
            except OSError as exc:
                if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise
            if deadline.expired():
                text = f"the lock of {self.path} was not free in time; is a process stopped that uses the file?"
                raise DistStoreError(text)
            pauses = pauses or backoff(LOCK_FIRST_PAUSE_S, LOCK_LONGEST_PAUSE_S, deadline)
            pause(next(pauses))

    # ------------------------------------------------------------ within `locked`

    def change(self, changes: Sequence[Change]) -> None:
        """Writes the changes before it applies them, so that a full disk leaves file and contents unchanged."""
        self._write(changes)
        self._apply(changes)

    def _apply_new(self) -> None:
        offset = self._offset
        try:
            self._apply(self._read())
        except KeyError as exc:  # of a value or queue to remove
            self._offset = offset  # so that each later use fails as well
            raise DistStoreError(
                f"{self.path} has a record after byte {offset} that no store wrote: it removes {exc}, which is not "
                "there; use another file"
            ) from exc

    def _apply(self, changes: Iterable[tuple[int, str, bytes]]) -> None:
        values = self.contents.values
        for code, key, value in changes:
            if code == _SET:  # most of them
                values[key] = value
            elif code == _OPENED:
                self._num_opened += 1
            elif code == _CLOSED:
                self._num_closed += 1
            else:
                self.contents.apply(Change(Code(code), key, value))

    def _read(self) -> list[tuple[int, str, bytes]]:
        """Returns the changes that were not read before, in order, as code, key and value."""
        data = self._read_rest()
        changes: list[tuple[int, str, bytes]] = []
        position, end = 0, len(data)
        while end - position >= _RECORD_BYTES:
            length, checksum = _read_record(data, position)
            start = position + _RECORD_BYTES
            stop = start + length
            if length > MAX_RECORD_BYTES or (stop <= end and zlib.crc32(data[start:stop]) != checksum):
                raise DistStoreError(f"{self.path} is damaged at byte {self._offset + position}")
            if stop > end:
                break
            try:
                while start < stop:
                    code, key_length, value_length = _read_change(data, start)
                    key_start = start + _CHANGE_BYTES
                    middle = key_start + key_length
                    start = middle + value_length
                    if start > stop or not 0 < code <= _CLOSED:
                        raise ValueError(f"change {code} ends at {start - stop} bytes after its record")
                    changes.append((code, data[key_start:middle].decode("utf-8", "surrogatepass"), data[middle:start]))
            except (struct.error, ValueError) as exc:  # the record is whole, and another program wrote it
                raise DistStoreError(
                    f"{self.path} has a record at byte {self._offset + position} that this version of rpcdist cannot "
                    "read; use the same version in all processes, and another file"
                ) from exc
            position = stop
        self._offset += position
        return changes

    def _write(self, changes: Iterable[Change]) -> None:
        """Appends one record, after all others were read. If that fails (a full disk), the file is as before."""
        body = b"".join(
            _CHANGE.pack(change.code, len(key), len(change.value)) + key + change.value
            for change in changes
            for key in (change.key.encode("utf-8", "surrogatepass"),)
        )
        if len(body) > MAX_RECORD_BYTES:
            raise DistStoreError(f"a record of {len(body)} bytes is too large for {self.path}")
        offset = self._offset
        os.ftruncate(self._descriptor, offset)  # cuts off the part of a record that a killed writer left
        record = _RECORD.pack(len(body), zlib.crc32(body)) + body
        with on_error(partial(os.ftruncate, self._descriptor, offset)):
            _write_all(self._descriptor, record, offset)
        self._offset = offset + len(record)

    def _read_rest(self) -> bytes:
        offset, parts = self._offset, []
        while True:
            part = os.pread(self._descriptor, _READ_BYTES, offset)
            parts.append(part)
            offset += len(part)
            if len(part) < _READ_BYTES:
                return b"".join(parts)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


@contextmanager
def _system_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if isinstance(exc, DistStoreError):
            raise
        hint = " (all users of the store have closed it, or the file was removed)" if exc.errno == errno.ENOENT else ""
        text = f"the file of a store cannot be used: {path}: {own_shortage(exc) or exc.strerror}{hint}"
        raise DistStoreError(text) from exc


__all__ = ["FileStore"]


class FileStore(Store):
    """A store in a file. A process that is killed during a write does no harm.

    All processes pass the same path, a new one for each job: otherwise they would find keys of an earlier run. With a
    known `world_size`, the last of that many stores to be closed or dropped removes the file. If a process is killed,
    the file stays.

    A wait reads the file's size after random pauses of at most 100 ms, as a file shared between machines has no events.

    Args:
        file_name: the file, which is created if necessary; its folder must exist.
        world_size: how many processes will use the store; -1 if unknown.
        timeout: the limit of waits without a timeout of their own.

    Raises:
        DistStoreError: the file cannot be used.
    """

    def __init__(
        self, file_name: str | os.PathLike[str], world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__(timeout)
        close_dropped()
        self.path = os.path.abspath(os.fspath(file_name))
        self._table = FileTable(self.path, world_size)
        self._closer = weakref.finalize(self, _drop, os.getpid(), self._table)

    @property
    def address(self) -> str:
        return f"file {self.path}"

    def clone(self) -> FileStore:
        """Returns another store object for the file; it does not count as one of the `world_size` users."""
        return FileStore(self.path, -1, self._timeout_s)

    def close(self) -> None:
        """Ends the use of the store; the last of `world_size` users removes the file. Idempotent, bounded."""
        if self._closer.detach() is not None:
            self._table.close()

    def _held(self) -> AbstractContextManager[None]:
        return self._table.locked(writing=True)

    def execute(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        result = self._table.still_lacks(operation) or self._table.execute(operation)
        pauses: Iterator[float] | None = None
        while isinstance(result, Missing) and not deadline.expired():
            pauses = pauses or backoff(POLL_S, TICK_S, deadline)
            pause(next(pauses))
            if deadline.expired() or self._table.maybe_grown():
                result = self._table.execute(operation)
        return result


def _drop(pid: int, table: FileTable) -> None:
    """Closes a dropped store. Does not wait, as a finalizer may run in the middle of an operation on this file."""
    try:
        table.close(limit_s=0.0)
    except DistStoreError:
        close_later(pid, table.close)
