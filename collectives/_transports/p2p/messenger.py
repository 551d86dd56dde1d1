"""Sends and receives between the ranks of a group, over one stream socket per direction.

[Note: progress] A send tries its socket at once, on the caller's thread and under the lock. A small one with nothing
before it needs no request if the socket takes all of it. The rest of a send, and every receive, has a `Request`. A
thread that waits for a request drives the sockets itself or follows the thread that does (`ProgressEngine`). Requests
that no thread waits for are driven by the group's background thread. The
leader has a turn at each socket after the other, so that both directions of an exchange move: it reads the sockets that
a request waits for (rule M6 of `Matcher`), and writes the rest of the messages. It observes the deadlines, and sleeps
in poll when nothing can be done. A send that the receiver does not read is stuck, and while it is stuck this rank reads
what others send to it, up to a limit; so two ranks that send to each other first and receive then do not block each
other below that limit, and not at all when their receives are posted.

[Note: what an error leaves behind] A mismatch fails the receive and the send, or one of the sender's next operations
with that rank, as it looks for refusals once a millisecond; the payload is dropped, and the connection goes on. A later
send that fails so is sent all the same, since the receiver counts on it. A
receive that timed out is withdrawn; when its message had begun, that message is lost. A send that timed out is
withdrawn, but when it had begun, its connection ends, and both sides say so. The end of a connection is final.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import torch

from rpcdist.collectives._operations.dense import memory_of
from rpcdist.collectives._operations.operation import dtype_code
from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.peer_sockets import OutgoingConnection
from rpcdist.collectives._transports.p2p.progress_engine import ProgressEngine
from rpcdist.collectives._transports.p2p.requests import MessageFrame, MessageTitle, PostedReceive, Request, pack_header
from rpcdist.collectives._transports.transport_base import SpinPolicy, ranks_here
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveError, GroupAborted, ProtocolViolation, RpcdistError, TransportError
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import CLOSE_LIMIT_S, MIN_WAIT_S
from rpcdist.transport import fork
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.sockets import SocketHub

BUFFER_LIMIT_BYTES: Final = 64 << 20
SMALL_BYTES: Final = 1 << 17
"""The largest payload that is copied behind its header."""

Connect = Callable[[int, float, Callable[[], None]], StreamSocket]
"""Opens the connection on which this rank sends: takes the peer, a limit in seconds, and a function that raises when it
should give up; may block."""


class Messenger:
    """The messages of one rank. Any thread may use it, except the threads of event loops: calls may block.

    Args:
        connect: opens a connection; called once for each peer, on the thread of the first send to it.
        buffer_limit_bytes: limit for each peer of the messages that are kept before their receive is called.
        num_ranks_here: ranks of the group on this host, for the `SpinPolicy`.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        ranks: Sequence[int],
        connect: Connect,
        *,
        buffer_limit_bytes: int = BUFFER_LIMIT_BYTES,
        num_ranks_here: int = 0,
    ) -> None:
        self._group_name = group_name
        self._rank = rank
        self._connect = connect
        self._state = MessageState(rank, ranks, buffer_limit_bytes)
        self._progress = ProgressEngine(self._state, SpinPolicy(num_ranks_here), group_name)
        self._lock = self._progress.lock
        self._entrance = self._progress.entrance
        self._num_calls = {"send": 0, "recv": 0}

    # ------------------------------------------------------------ operations

    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool, timeout_s: float) -> Work:
        """See `GroupBackend.send`. The first one to a peer opens the connection, blocking, also when asynchronous.

        Raises:
            RankLost: the peer is gone or cannot be reached.
            CollectiveError: this process lacks a descriptor or the like to open the connection; the text names it.
            CollectiveMismatch: the peer refused this message, or an earlier one.
            CollectiveTimeout: the peer did not read it in time.
        """
        title = self._title("send", peer, tag)
        request: Request | None = None
        try:
            with self._entrance, self._lock:
                self._raise_error()
                is_new = peer not in self._state.outgoing
                connection = self._state.new_connection(peer) if is_new else self._state.outgoing[peer]
                message = self._small_message(connection, tensor, tag)
                try:
                    num_sent = (connection.send_at_once(message) or 0) if message else 0
                    if 0 < num_sent == len(message):
                        connection.stream.num_sent += 1
                    else:
                        request = Request(title, tensor, peer, timeout_s, self._progress)
                        self._state.put(request, connection, num_sent)
                except BaseException:  # of a signal handler: what was sent is unknown, or the rest of it is missing
                    connection.end("a send was interrupted")
                    raise
                if self._state.settled or (asynchronous and request is not None):
                    self._progress.changed()
            if request is None and not self._state.settled:
                return Work.finished(title)
            if request is not None and is_new and not request.done:
                self._open(connection, timeout_s)
            return self._finish(request or Work.finished(title), asynchronous)
        except BaseException:
            self._withdraw(request)
            raise

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool,
        timeout_s: float,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """See `GroupBackend.recv`.

        Raises:
            RankLost: the peer, or for any source every other rank, is gone.
            CollectiveMismatch: the message that came has another size or dtype.
            CollectiveTimeout: none came, or not completely, in time.
        """
        title = self._title("recv", peer, tag)
        receive = PostedReceive(title, tensor, peer, timeout_s, self._progress)
        receive.finish = finish
        try:
            with self._entrance, self._lock:
                self._raise_error()
                self._state.post(receive)
                if asynchronous:
                    self._progress.changed()
            return self._finish(receive, asynchronous)
        except BaseException:
            self._withdraw(receive)
            raise

    def _title(self, verb: str, peer: int | None, tag: int) -> MessageTitle:
        """Begins a call: counts and names it."""
        fork.check_not_forked()
        self._num_calls[verb] += 1
        rank = None if peer is None else self._state.ranks[peer]
        return MessageTitle(verb, self._num_calls[verb], rank, tag, self._group_name)

    def _raise_error(self) -> None:
        if self._state.error is not None:
            raise self._state.error

    def _finish(self, work: Work, asynchronous: bool) -> Work:
        """Ends a call: an asynchronous one returns at once, a blocking one when its request is settled."""
        self._progress.settle()
        if not asynchronous:
            work.wait()
        return work

    def _withdraw(self, request: Request | None) -> None:
        """Ends what a call has begun that fails, or is interrupted: its tensor is not used any more."""
        if request is None or request.is_completed():
            return
        with self._entrance, self._lock:
            if not request.done:
                self._state.withdraw(request)
            self._progress.changed()
        self._progress.settle()
        with suppress(CollectiveError):
            request.wait(CLOSE_LIMIT_S)  # another thread may be copying its message

    # ------------------------------------------------------------ sending

    def _small_message(self, connection: OutgoingConnection, tensor: torch.Tensor, tag: int) -> bytes:
        """The bytes of a small message that has nothing before it; none if it needs a request. The lock is held."""
        if connection.stream.queue or not connection.is_open or tensor.nbytes > SMALL_BYTES:
            return b""
        self._state.read_refusals(connection, time.monotonic())
        if connection.refusals or not connection.is_open:  # only a request can fail with it
            return b""
        number = connection.stream.num_sent
        header = pack_header(MessageFrame.MESSAGE, dtype_code(tensor.dtype), tag, number, tensor.nbytes)
        return header + memory_of(tensor)

    def _open(self, connection: OutgoingConnection, timeout_s: float) -> None:
        """Opens a new connection, which has messages already, also of other threads; it is ended if that fails."""
        sock, reason, shortage = None, "the connection was interrupted", None
        try:
            sock = self._connect(connection.peer, timeout_s, self._raise_error)
        except (OSError, RpcdistError) as exc:
            shortage, reason = own_shortage(exc), f"it cannot be reached: {exc}"
        finally:
            with self._entrance, self._lock:
                if sock is not None:
                    connection.open(sock)
                if not connection.is_open:
                    if shortage is not None:
                        self._state.fail_unopened(connection, shortage)
                    self._state.expire(time.monotonic())  # silence until the deadline does not say that it is gone
                    connection.end(reason)
                    del self._state.outgoing[connection.peer]  # the next send tries again
                connection.write()
                self._progress.changed()

    # ------------------------------------------------------------ events from outside (any thread; never blocks)

    def attach(self, peer: int, sock: StreamSocket) -> None:
        """Takes the connection on which `peer` sends; it belongs to this object from now on.

        Raises:
            ProtocolViolation: there is one already; the socket is closed.
        """
        with self._entrance, self._lock:
            if self._progress.stopped:
                sock.close()
            else:
                self._state.attach(peer, sock)
                self._progress.changed()

    def fail(self, error: BaseException) -> None:
        """Fails everything that is pending, and everything later, with this error; idempotent."""
        with self._entrance, self._lock:
            self._state.fail(error)
            self._progress.changed(bool(self._state.settled))

    def peer_lost(self, rank: int, reason: str) -> None:
        """Notes that a rank of the group is gone. Messages that it sent before can still be received."""
        with self._entrance, self._lock:
            self._state.lose(rank, reason)
            self._progress.changed(bool(self._state.settled))

    def drain(self, timeout_s: float) -> list[Request]:
        """Waits until all sends have left this process, for at most `timeout_s` in all; returns those that have not.

        It does not wait for receives: their messages may never come.
        """
        limit = time.monotonic() + timeout_s
        with self._entrance, self._lock:
            sends = [request for request in self._state.pending if not isinstance(request, PostedReceive)]
        for request in sends:
            with suppress(CollectiveError):  # the owner of the work gets the error
                request.wait(max(MIN_WAIT_S, limit - time.monotonic()))
        return [request for request in sends if not request.is_completed()]

    def close(self) -> None:
        """Fails pending requests, sends goodbyes, closes the sockets; idempotent, bounded, waits for no peer."""
        if not self._progress.stopped:
            self.fail(GroupAborted(f"sends and receives of group {self._group_name!r}", "the group was destroyed here"))
            self._progress.stop()


logger = logging.getLogger(__name__)


class Mailboxes(Messenger):
    """A `Messenger` whose connections come from and go to socket hubs. Connections are opened by the first send.

    Args:
        hub: the hub of this process; None for a group of one.
        uid: an identifier of the group; the same on all ranks, and different from those of other groups.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        ranks: Sequence[int],
        hub: SocketHub | None = None,
        uid: str = "",
        addresses: Sequence[str] = (),
    ) -> None:
        super().__init__(group_name, rank, ranks, self._dial, num_ranks_here=ranks_here(rank, addresses))
        self._hub, self._uid = hub, uid
        self._addresses = tuple(addresses)
        self._prefix = f"{uid}/messages to {rank} from "
        if hub is not None:
            hub.announce(self._prefix, self._answer)

    def _dial(self, peer: int, timeout_s: float, check: Callable[[], None]) -> StreamSocket:
        if self._hub is None:
            raise TransportError("this group has no socket hub")
        purpose = f"{self._uid}/messages to {peer} from {self._rank}"
        return self._hub.connect(self._addresses[peer], purpose, timeout_s, check=check)

    def _answer(self, purpose: str, sock: StreamSocket) -> None:
        """Takes a connection for this group, on the I/O loop."""
        source = purpose.removeprefix(self._prefix)
        try:
            if not source.isascii() or not source.isdigit() or int(source) >= len(self._state.ranks):
                raise ProtocolViolation(f"it has no rank {source!r}")
            self.attach(int(source), sock)
        except ProtocolViolation as exc:
            sock.close()
            logger.warning("a connection of group %r was closed: %s", self._group_name, exc)

    def close(self) -> None:
        """Closes like `Messenger.close`, and takes no more connections."""
        if self._hub is not None:
            self._hub.withdraw(self._prefix)
        super().close()
