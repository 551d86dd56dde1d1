"""Messages between two ranks over MPI: `send` and `recv` of the `mpi` backend.

A message starts with a small header on one communicator, with the user's tag; its elements follow on another
communicator, with a number from the header. So a receiver knows size and dtype before it posts memory, a receive from
any source learns the sender, and two receives of one tag cannot take each other's elements.

No thread blocks inside MPI: a thread that waits for a message, or a thread of the group while asynchronous messages are
in progress, polls all of them in turn.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from rpcdist.collectives._group.state import GroupFailure
from rpcdist.collectives._mpi.mpi_transport import abandon, as_bytes, pauses
from rpcdist.collectives._operations.operation import DTYPES, dtype_code
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, ConfigError, GroupAborted
from rpcdist.own_shortage import NO_THREAD
from rpcdist.time_limits import IDLE_RECHECK_S, THREAD_GRACE_S

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


_HEADER: Final = struct.Struct("<QIB3x")  # size in bytes, number, dtype
_NUMBERS: Final = 1 << 15
"""The numbers of messages repeat after this many, as MPI guarantees only tags up to 2**15 - 1."""


@dataclass(eq=False, slots=True)
class _MpiMessage:
    """A send or a receive of this rank.

    Attributes:
        requests: the calls of MPI that are not done; of a receive, first that of the header, then that of the elements.
        expects_header: whether it is a receive whose header has not come.
        source: the sender of a receive, from its header.
    """

    work: Work
    deadline: Deadline
    tensor: torch.Tensor
    header: bytes | bytearray
    finish: Callable[[], None] | None = None
    expects_header: bool = False
    requests: list[MPI.Request] = field(default_factory=list)
    source: int = -1


@dataclass(eq=False, repr=False)
class MpiMessages:
    """The messages of one group.

    Args:
        headers: a communicator of the group's members in rank order, for these messages alone.
        elements: another such communicator.
        report: called when a message fails in a way that ends the group; on any thread.
    """

    mpi: ModuleType
    _headers: MPI.Intracomm
    _elements: MPI.Intracomm
    _group: str
    _world_ranks: tuple[int, ...]
    _report: Callable[[GroupFailure], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _polling: threading.Lock = field(default_factory=threading.Lock)  # its holder polls for all threads
    _pending: deque[_MpiMessage] = field(default_factory=deque)
    _error: GroupFailure | None = None
    _closing: bool = False
    _poller: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._me = self._headers.Get_rank()
        self._changed = threading.Condition(self._lock)
        self._numbers = [0] * self._headers.Get_size()

    # ------------------------------------------------------------ posting (any thread)

    def send(
        self, title: object, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool, timeout_s: float
    ) -> Work:
        self._check(title, tag, asynchronous)
        with self._lock:
            number = self._numbers[peer]
            self._numbers[peer] = (number + 1) % _NUMBERS
            header = _HEADER.pack(tensor.nbytes, number, dtype_code(tensor.dtype))
            message = _MpiMessage(Work(title, [tensor]), Deadline.after(timeout_s), tensor, header)
            message.requests = [
                self._headers.Isend([header, self.mpi.BYTE], peer, tag),
                self._elements.Isend(as_bytes(self.mpi, tensor), peer, number),
            ]
            self._add(message)
        return self._wait_unless_asynchronous(message, asynchronous)

    def recv(
        self,
        title: object,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool,
        timeout_s: float,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        self._check(title, tag, asynchronous)
        work, header = Work(title, [tensor]), bytearray(_HEADER.size)
        message = _MpiMessage(work, Deadline.after(timeout_s), tensor, header, finish, expects_header=True)
        source = self.mpi.ANY_SOURCE if peer is None else peer
        with self._lock:
            message.requests = [self._headers.Irecv([header, self.mpi.BYTE], source, tag)]
            self._add(message)
        return self._wait_unless_asynchronous(message, asynchronous)

    def _check(self, title: object, tag: int, asynchronous: bool) -> None:
        if self._error is not None:
            raise self._error.error(str(title))
        largest = self._headers.Get_attr(self.mpi.TAG_UB)
        if not 0 <= tag <= largest:
            raise ConfigError(f"{title}: a tag must be from 0 to {largest} with this MPI")
        with self._lock:
            if asynchronous and self._poller is None:  # before MPI has the message, which nothing else would move
                poller = threading.Thread(target=self._poll, name=f"rpcdist mpi {self._group}", daemon=True)
                try:
                    poller.start()
                except RuntimeError as exc:
                    raise CollectiveError(str(title), NO_THREAD) from exc
                self._poller = poller

    def _add(self, message: _MpiMessage) -> None:
        self._pending.append(message)
        self._changed.notify_all()

    def _wait_unless_asynchronous(self, message: _MpiMessage, asynchronous: bool) -> Work:
        if asynchronous:
            return message.work
        pause = pauses()
        while not message.work.is_completed():
            self._poll_all()
            next(pause)
        message.work.wait()
        return message.work

    def _receive_elements(self, message: _MpiMessage) -> MPI.Request:
        """Posts memory for the elements of a header. Raises CollectiveError if size or dtype do not fit."""
        size_bytes, number, code = _HEADER.unpack(message.header)
        tensor, source = message.tensor, message.source
        if size_bytes != tensor.nbytes or code != dtype_code(tensor.dtype):
            sent = f"{size_bytes} bytes of {str(DTYPES[code]).removeprefix('torch.')}"
            expected = f"{tensor.nbytes} bytes of {str(tensor.dtype).removeprefix('torch.')}"
            names = self._world_ranks[source], self._world_ranks[self._me]
            reason = f"rank {names[0]} sent {sent}, but rank {names[1]} expects {expected}"
            raise GroupFailure(CollectiveMismatch, reason, (source, self._me)).error(message.work.title)
        return self._elements.Irecv(as_bytes(self.mpi, tensor), source, number)

    # ------------------------------------------------------------ looking

    def _is_done(self, message: _MpiMessage) -> bool:
        """Continues a message, with the lock held; returns whether it is done."""
        if message.expects_header:
            status = self.mpi.Status()
            if not message.requests[0].Test(status):
                return False
            message.expects_header = False
            message.source = status.Get_source()
            message.requests = [self._receive_elements(message)]
        message.requests = [request for request in message.requests if not request.Test()]
        if message.requests:
            return False
        if message.finish is not None:
            message.finish()
        return True

    def _poll(self) -> None:
        while True:
            with self._lock:
                while not self._pending:
                    if self._closing:
                        return
                    self._changed.wait(IDLE_RECHECK_S)
            pause = pauses()
            while self._pending:
                self._poll_all()
                next(pause)

    def _poll_all(self) -> None:
        """Polls all messages in progress, in the order of posting, unless another thread does."""
        if not self._polling.acquire(blocking=False):
            return
        try:
            with self._lock:
                done, failed = self._find_done()
                for message in done:
                    self._pending.remove(message)
                self._changed.notify_all()
        finally:
            self._polling.release()
        for message in done:
            message.work.complete(message.source)
        if failed is not None:
            self._fail(*failed)

    def _find_done(self) -> tuple[list[_MpiMessage], tuple[_MpiMessage, Exception] | None]:
        done = []
        for message in self._pending:
            try:
                if self._is_done(message):
                    done.append(message)
                elif message.deadline.expired():
                    return done, (message, self._timed_out(message))
            except (CollectiveError, self.mpi.Exception) as exc:
                return done, (message, exc)
        return done, None

    def _timed_out(self, message: _MpiMessage) -> CollectiveError:
        reason = "it was not done in time: the other rank did not call its part, or has ended"
        return GroupFailure(CollectiveTimeout, reason).error(message.work.title)

    def _fail(self, message: _MpiMessage, exc: Exception) -> None:
        kind, reason = CollectiveError, f"MPI reported: {exc}"
        if isinstance(exc, CollectiveError):
            kind, reason = type(exc), exc.reason
        failure = GroupFailure(kind, f"{message.work.title}: {reason}")
        self._report(failure)
        self.fail(failure)

    # ------------------------------------------------------------ ending

    def fail(self, failure: GroupFailure) -> None:
        """Fails all messages in progress, because the group failed. Any thread may call it; never waits long."""
        with self._lock:
            if self._error is None:
                self._error = failure
            messages = list(self._pending)
            self._pending.clear()
            self._changed.notify_all()
        for message in messages:
            abandon(message.requests, [message.tensor, message.header])
            message.work.fail(failure.error(message.work.title))

    def peer_lost(self, rank: int, reason: str) -> None:
        """Does nothing: messages of a rank that left can still arrive, and the others time out."""

    def close(self, deadline: Deadline) -> bool:
        """Waits for messages in progress, then ends the thread; returns whether all were done in time. Idempotent."""
        pause = pauses()
        while self._pending and not deadline.expired():
            self._poll_all()
            next(pause)
        drained = not self._pending
        self.fail(GroupFailure(GroupAborted, "the group was destroyed on this rank"))
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._poller is not None:
            self._poller.join(THREAD_GRACE_S)
        return drained
