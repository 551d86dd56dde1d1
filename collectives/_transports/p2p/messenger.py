"""Sends and receives between the ranks of a group, over one stream socket per direction.

[Note: progress] A small message goes the way of `SmallMessages` when nothing is under way that it had to observe. Else
a blocking call tries its socket at once on the caller's thread, and if that is not enough, leads or follows
(`Leadership`). An asynchronous send tries at once; the rest is left to the leader, and waiting for it is the
same as a blocking call. The leader reads the sockets that a request waits for (rule M6 of `Matcher`), writes the rest
of the messages, observes the deadlines, and sleeps in poll when nothing can be done. A send that the receiver does not
read is stuck, and while it is stuck this rank reads what others send to it, up to a limit; so two ranks that send to
each other first and receive then do not block each other below that limit, and not at all when their receives are
posted.

[Note: what an error leaves behind] A mismatch fails the receive and the send, or the sender's next operation with that
rank; the payload is dropped, and the connection goes on. A receive that timed out is withdrawn; when its message had
begun, that message is lost. A send that timed out is withdrawn, but when it had begun, its connection ends, and both
sides say so. The end of a connection is final.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from rpcdist.collectives._transports.p2p.leadership import PendingWork
from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.peer_sockets import OutgoingConnection, prepare
from rpcdist.collectives._transports.p2p.progress_engine import ProgressEngine
from rpcdist.collectives._transports.p2p.requests import MessageTitle, PostedReceive, Request
from rpcdist.collectives._transports.p2p.small_messages import SMALL_BYTES, SmallMessages
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveError, GroupAborted, ProtocolViolation, RpcdistError
from rpcdist.time_limits import MESSAGE_SPIN_S, MIN_WAIT_S, REFUSAL_POLL_S
from rpcdist.transport import fork

__all__ = ["BUFFER_LIMIT_BYTES", "Connect", "Messenger"]

BUFFER_LIMIT_BYTES: Final = 64 << 20


class Connect(Protocol):
    """Opens the connection on which this rank sends to `peer`; may block; `check` raises when it should give up."""

    def __call__(self, peer: int, timeout_s: float, check: Callable[[], None]) -> socket.socket: ...


class Messenger:
    """The messages of one rank. Any thread may use it, but for the threads of event loops: calls may block.

    Args:
        group_name: the group's name in errors.
        rank: this process's rank in the group.
        ranks: the members' ranks in the world, by rank in the group.
        connect: opens a connection; called once for each peer, on the thread of the first send to it.
        buffer_limit_bytes: limit for each peer of the messages that are kept before their receive is called.
        spin_s: how long a blocked thread tries its socket before it sleeps, in seconds.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        ranks: Sequence[int],
        connect: Connect,
        *,
        buffer_limit_bytes: int = BUFFER_LIMIT_BYTES,
        spin_s: float = MESSAGE_SPIN_S,
    ) -> None:
        self._group_name = group_name
        self._rank = rank
        self._connect = connect
        self._state = MessageState(rank, ranks, buffer_limit_bytes)
        self._progress = ProgressEngine(self._state, spin_s, f"rpcdist p2p {group_name}")
        self._lock = self._progress.lock
        self._leadership = self._progress.leadership
        self._small = SmallMessages(self._progress)
        self._num_sends = 0
        self._num_receives = 0
        self._closed = False

    def __repr__(self) -> str:
        state = self._state
        return f"<{type(self).__name__} of group {self._group_name!r}: {len(state.pending)} pending, {state.matcher!r}>"

    # ------------------------------------------------------------ operations

    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool, timeout_s: float | None) -> Work:
        """See `GroupBackend.send`. The first one to a peer opens the connection, blocking, also when asynchronous.

        Raises:
            RankLost: the peer is gone or cannot be reached.
            CollectiveMismatch: the peer refused this message, or an earlier one.
            CollectiveTimeout: the peer did not read it in time.
        """
        self._num_sends += 1
        title = MessageTitle("send", self._num_sends, self._state.ranks[peer], tag, self._group_name)
        self._check(title)

        def make_request() -> Request:
            request = Request(title, tensor, peer, tag, math.inf if timeout_s is None else timeout_s)
            if asynchronous:
                request.work = PendingWork(request, self._leadership)
            return request

        if tensor.nbytes <= SMALL_BYTES:
            sent = self._small.send(tensor, peer, tag, make_request)
            if sent:
                return Work.finished(title) if sent is True else self._finish(sent)
        request = make_request()
        if peer == self._rank:
            with self._lock:
                self._state.put_to_self(request)
            self._progress.settle(request)
        else:
            self._start_send(request)
        return self._finish(request)

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool,
        timeout_s: float | None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """See `GroupBackend.recv`.

        Raises:
            RankLost: the peer, or for any source every other rank, is gone.
            CollectiveMismatch: the message that came has another size or dtype.
            CollectiveTimeout: none came, or not completely, in time.
        """
        self._num_receives += 1
        source = None if peer is None else self._state.ranks[peer]
        title = MessageTitle("recv", self._num_receives, source, tag, self._group_name)
        self._check(title)
        if not asynchronous and peer is not None and tensor.nbytes <= SMALL_BYTES:
            if self._small.recv(tensor, peer, tag):
                if finish is not None:
                    finish()
                return Work.finished(title, source=peer)
        receive = PostedReceive(title, tensor, peer, tag, math.inf if timeout_s is None else timeout_s)
        receive.finish = finish
        if asynchronous:
            receive.work = PendingWork(receive, self._leadership, [tensor])
        with self._lock:
            self._state.post(receive)
            if not receive.done:
                self._leadership.ensure() if asynchronous else self._leadership.changed()
        if receive.done:
            self._progress.settle(receive)
        return self._finish(receive)

    def _check(self, title: MessageTitle) -> None:
        fork.check_not_forked()
        if not -(1 << 63) <= title.tag < 1 << 63:
            raise ValueError(f"{title}: a tag is a signed number of 64 bits")
        if self._state.error is not None:
            raise self._state.error
        if self._closed:
            raise GroupAborted(str(title), "the group was destroyed on this rank")

    def _finish(self, request: Request) -> Work:
        """Ends a call: an asynchronous one returns at once, a blocking one when the request is settled."""
        if request.work is not None:
            return request.work
        if not request.settled:
            try:
                self._leadership.wait(request)
            except BaseException:
                self._abandon(request)
                raise
        if request.error is not None:
            raise request.error
        return Work.finished(request.title, source=request.source)

    def _abandon(self, request: Request) -> None:
        """Has the leader fail a request, whose caller was interrupted, like one that is overdue."""
        with self._lock:
            if not request.done:
                request.deadline_at = self._state.next_deadline = -math.inf
                self._leadership.ensure()

    def _start_send(self, request: Request) -> None:
        with self._lock:
            connection = self._state.put(request)
            mine = connection is not None and not connection.busy
            if connection is not None and mine:
                connection.busy = True
            elif connection is not None:
                self._leadership.ensure() if request.work is not None else self._leadership.changed()
        if connection is not None and mine:
            if connection.sock is None:
                self._open(connection, request)
            if connection.ended is None:
                self._write_directly(connection, request)
        if self._state.settled:
            self._progress.settle(request)

    def _open(self, connection: OutgoingConnection, request: Request) -> None:
        """Opens a connection that this thread has made busy."""
        reason, sock = "the connection was interrupted", None
        try:
            sock = self._connect(connection.peer, max(0.0, request.deadline_at - time.monotonic()), self._raise_error)
            prepare(sock)
        except (OSError, RpcdistError) as exc:
            reason = f"it cannot be reached: {exc}"
        finally:
            with self._lock:
                connection.sock = sock
                if sock is None:
                    del self._state.outgoing[connection.peer]  # the next send tries again
                    self._state.end_outgoing(connection, reason)
                    self._leadership.changed()

    def _raise_error(self) -> None:
        if self._state.error is not None:
            raise self._state.error

    def _write_directly(self, connection: OutgoingConnection, request: Request) -> None:
        try:
            now = time.monotonic()
            if now - connection.refusals_read_at > REFUSAL_POLL_S:
                connection.refusals_read_at = now
                self._progress.read_refusals(connection)
            self._progress.write(connection)
        except BaseException:  # of a signal handler: the position in the stream is unknown
            with self._lock:
                self._state.end_outgoing(connection, f"{request.title} was interrupted")
                self._progress.release_locked(connection)
                self._leadership.changed()
            raise
        if connection.stream:
            with self._lock:
                self._leadership.ensure() if request.work is not None or request.done else self._leadership.changed()

    # ------------------------------------------------------------ events from outside (any thread; never blocks)

    def attach(self, peer: int, sock: socket.socket) -> None:
        """Takes the connection on which `peer` sends; it belongs to this object from now on.

        Raises:
            ProtocolViolation: there is one already; the socket is closed.
        """
        with self._lock:
            try:
                if self._closed:
                    sock.close()
                    return
                self._state.attach(peer, sock)
            except (ProtocolViolation, OSError):
                sock.close()
                raise
            self._leadership.changed()

    def fail(self, error: BaseException) -> None:
        """Fails everything that is pending, and everything later, with this error; idempotent."""
        self._progress.fail(error)

    def peer_lost(self, rank: int, reason: str) -> None:
        """Notes that a rank of the group is gone. Messages that it sent before can still be received."""
        with self._lock:
            self._state.lost.setdefault(rank, reason)
            self._leadership.changed()

    def drain(self, timeout_s: float) -> bool:
        """Waits until all sends have left this process, for at most `timeout_s` in all; returns whether they have.

        It does not wait for receives: their messages may never come.
        """
        limit = time.monotonic() + timeout_s
        with self._lock:
            works = [
                request.work
                for request in self._state.pending
                if request.work is not None and not isinstance(request, PostedReceive)
            ]
        for work in works:
            try:
                work.wait(max(MIN_WAIT_S, limit - time.monotonic()))
            except CollectiveError:  # the owner of the work gets the error
                pass
        return all(work.is_success() for work in works)

    def close(self) -> None:
        """Fails pending requests, sends goodbyes, closes the sockets; idempotent, bounded, waits for no peer."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.fail(GroupAborted(f"sends and receives of group {self._group_name!r}", "the group was destroyed here"))
        with self._lock:
            self._leadership.stop()
        self._leadership.join()
