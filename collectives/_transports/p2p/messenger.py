"""Sends and receives between the ranks of a group, over one stream socket per direction.

[Note: progress] A send tries its socket at once, on the caller's thread and under the lock. A small message that is
first in the queue needs no request if the socket takes all of it. The rest of a send, and every receive, has a
`Request`. A thread that waits for a request drives the sockets itself or follows the thread that does
(`ProgressEngine`). The group's background thread drives requests for which no thread waits. The driver serves the
sockets in turn, so that both directions of an exchange advance: it reads the sockets that a request waits for (rule M6
of `Matcher`), writes the rest of the messages, checks deadlines, and sleeps in poll when no socket is ready. A send is
stuck while its receiver does not read. Meanwhile this rank reads the messages of other ranks, up to a limit; so two
ranks that both send first and receive afterwards do not block each other below that limit, and not at all when their
receives are posted.

[Note: what an error leaves behind] A mismatch fails the receive and the send; or, because the sender looks for refusals
only once a millisecond, one of its next operations with that rank. The payload is dropped, and the connection stays
usable. A later send that fails for this reason is sent all the same, because the receiver expects it. A receive that
times out is withdrawn; if a part of its message has arrived, the message is lost. A send that times out is withdrawn;
if a part of it has left, the connection ends, and both ranks report that. The end of a connection is final.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from rpcdist.collectives._operations.dense import memory_of
from rpcdist.collectives._operations.operation import dtype_code
from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.peer_sockets import OutgoingConnection
from rpcdist.collectives._transports.p2p.progress_engine import ProgressEngine
from rpcdist.collectives._transports.p2p.requests import MESSAGE, PostedReceive, Request, pack_header
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
"""The largest payload that is copied after its header."""

Connect = Callable[[int, float, Callable[[], None]], StreamSocket]
"""Opens the connection on which this rank sends. Takes the peer, a limit in seconds, and a function that raises when
the attempt must end; may block."""


class Messenger:
    """The messages of one rank. Any thread may use it, except the threads of event loops: calls may block.

    Args:
        connect: opens a connection; called once for each peer, on the thread of the first send to it.
        buffer_limit_bytes: the limit, per peer, of the messages that are kept until their receive is called.
        num_ranks_here: ranks of the group on this host, for the `SpinPolicy`.
        on_close: called before the messenger closes its connections.
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
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self._group_name = group_name
        self._connect = connect
        self._on_close = on_close
        self._state = MessageState(rank, ranks, buffer_limit_bytes)
        spin_policy = SpinPolicy(min(num_ranks_here, 2))  # a message concerns two ranks, and the others may sleep
        self._progress = ProgressEngine(self._state, spin_policy, group_name)
        self._lock = self._progress.lock
        self._entrance = self._progress.entrance

    # ------------------------------------------------------------ operations

    def send(
        self, title: object, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool, timeout_s: float
    ) -> Work:
        """See `GroupBackend.send`. The first send to a peer blocks to open the connection, even an asynchronous one."""
        fork.check_not_forked()
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
                        request = Request(title, tensor, peer, tag, timeout_s, self._progress)
                        self._state.put(request, connection, num_sent)
                except BaseException:  # from a signal handler: part of the message may have been sent
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
        title: object,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool,
        timeout_s: float,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """See `GroupBackend.recv`."""
        fork.check_not_forked()
        receive = PostedReceive(title, tensor, peer, tag, timeout_s, self._progress)
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

    def _raise_error(self) -> None:
        if self._state.error is not None:
            raise self._state.error

    def _finish(self, work: Work, asynchronous: bool) -> Work:
        self._progress.settle()
        if not asynchronous:
            work.wait()
        return work

    def _withdraw(self, request: Request | None) -> None:
        """Ends the request of a call that fails or is interrupted, so that its tensor is not used any more."""
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
        """Returns the bytes of a small message that is first in its queue; none if it needs a request."""
        if connection.stream.queue or not connection.is_open or tensor.nbytes > SMALL_BYTES:
            return b""
        self._state.read_refusals(connection, time.monotonic())
        if connection.refusals or not connection.is_open:  # only a request can report a refusal
            return b""
        number = connection.stream.num_sent
        header = pack_header(MESSAGE, dtype_code(tensor.dtype), tag, number, tensor.nbytes)
        return header + memory_of(tensor)

    def _open(self, connection: OutgoingConnection, timeout_s: float) -> None:
        """Opens a connection, in which threads have queued messages already; ends it if that fails."""
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
                    self._state.expire(time.monotonic())  # a peer that is silent until the deadline may still be alive
                    connection.end(reason)
                    del self._state.outgoing[connection.peer]  # the next send tries again
                connection.write()
                self._progress.changed()

    # ------------------------------------------------------------ events from outside (any thread; never blocks)

    def attach(self, peer: int, sock: StreamSocket) -> None:
        """Takes ownership of the connection on which `peer` sends."""
        with self._entrance, self._lock:
            if self._progress.stopped:
                sock.close()
            else:
                self._state.attach(peer, sock)
                self._progress.changed()

    def fail(self, error: BaseException) -> None:
        """Fails all pending and all later requests with this error; idempotent."""
        with self._entrance, self._lock:
            self._state.fail(error)
            self._progress.changed(bool(self._state.settled))

    def peer_lost(self, rank: int, reason: str) -> None:
        """Notes that a rank of the group is gone. Messages that it sent before can still be received."""
        with self._entrance, self._lock:
            self._state.lose(rank, reason)
            self._progress.changed(bool(self._state.settled))

    def drain(self, timeout_s: float) -> list[Request]:
        """Waits until all sends have left this process, for at most `timeout_s` in total; returns those that have not.

        It does not wait for receives, whose messages may never come.
        """
        limit = time.monotonic() + timeout_s
        with self._entrance, self._lock:
            sends = [request for request in self._state.pending if not isinstance(request, PostedReceive)]
        for request in sends:
            with suppress(CollectiveError):  # the owner of the work gets the error
                request.wait(max(MIN_WAIT_S, limit - time.monotonic()))
        return [request for request in sends if not request.is_completed()]

    def close(self) -> None:
        """Fails pending requests, sends goodbyes and closes the sockets. Idempotent; waits for no peer."""
        if self._on_close is not None:
            self._on_close()
        if not self._progress.stopped:
            self.fail(GroupAborted(f"sends and receives of group {self._group_name!r}", "the group was destroyed here"))
            self._progress.stop()


logger = logging.getLogger(__name__)


def open_messenger(
    group_name: str,
    rank: int,
    ranks: Sequence[int],
    hub: SocketHub | None = None,
    uid: str = "",
    addresses: Sequence[str] = (),
) -> Messenger:
    """Makes a `Messenger` that connects through socket hubs.

    Args:
        hub: the hub of this process; None for a group of one.
        uid: a unique identifier of the group, the same on all its ranks.
    """
    prefix = f"{uid}/messages to {rank} from "

    def connect(peer: int, timeout_s: float, check: Callable[[], None]) -> StreamSocket:
        if hub is None:
            raise TransportError("this group has no socket hub")
        return hub.connect(addresses[peer], f"{uid}/messages to {peer} from {rank}", timeout_s, check=check)

    def answer(purpose: str, sock: StreamSocket) -> None:  # on the I/O loop
        source = purpose.removeprefix(prefix)
        try:
            if not source.isascii() or not source.isdigit() or int(source) >= len(ranks):
                raise ProtocolViolation(f"it has no rank {source!r}")
            messenger.attach(int(source), sock)
        except ProtocolViolation as exc:
            sock.close()
            logger.warning("a connection of group %r was closed: %s", group_name, exc)

    on_close = None if hub is None else partial(hub.withdraw, prefix)
    num_ranks_here = ranks_here(rank, addresses)
    messenger = Messenger(group_name, rank, ranks, connect, num_ranks_here=num_ranks_here, on_close=on_close)
    if hub is not None:
        hub.announce(prefix, answer)
    return messenger
