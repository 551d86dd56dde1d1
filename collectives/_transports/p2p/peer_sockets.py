"""The two connections between this rank and another, one per direction, each with its stream and non-blocking steps."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from rpcdist.collectives._transports.p2p.byte_streams import MOST_BYTES, InStream, OutStream
from rpcdist.collectives._transports.p2p.requests import Header, MessageFrame, pack_header, take_refusals
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, has_buffered, num_owed

_REFUSALS_READ: Final = 4096

C = TypeVar("C", bound="_MessageConnection[Any]")
P = ParamSpec("P")
S = TypeVar("S", bound=InStream | OutStream)
T = TypeVar("T")


def _step(function: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T | None]:
    """Makes a method on a socket return None when it would block, and end the connection for any other error."""

    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(self, *args, **kwargs)
        except (BlockingIOError, InterruptedError):
            return None
        except ProtocolViolation as exc:
            reason = f"it does not follow the protocol ({exc}); the connection was closed"
        except OSError as exc:
            reason = f"the connection with it failed: {exc.strerror or exc}"
        except MemoryError as exc:
            reason = f"there is no memory to keep its message ({exc}); the connection was closed"
        except BaseException:  # of a signal handler: the position in the stream is unknown
            self.end(f"a {function.__name__.partition('_')[0]} was interrupted")
            raise
        self.end(reason)
        return None

    return run


class _MessageConnection(Generic[S]):
    """One of the two.

    Args:
        on_end: called when the connection cannot be used any more, with the reason.

    Attributes:
        sock: the socket, from `open` on.
        ended: the reason why the connection cannot be used any more; None while it can.
    """

    sock: StreamSocket

    def __init__(self, peer: int, stream: S, on_end: Callable[[str], None]) -> None:
        self.peer = peer
        self.stream = stream
        self._on_end = on_end
        self.is_open = False
        self.ended: str | None = None

    def open(self, sock: StreamSocket) -> None:
        """Takes a connected stream socket; closes it if the connection has ended meanwhile."""
        if self.ended is not None:
            sock.close()
            return
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        self.sock = sock
        self.is_open = True

    @property
    def has_buffered(self) -> bool:
        """Whether something can be read of which no poll tells."""
        return self.is_open and has_buffered(self.sock)

    def end(self, reason: str) -> None:
        """Closes the socket and tells `on_end`; only the first call counts."""
        if self.ended is None:
            self.ended = reason
            if self.is_open:
                self.is_open = False
                self.sock.close()
            self._on_end(reason)


class IncomingConnection(_MessageConnection[InStream]):
    """The connection on which messages of `peer` come."""

    @_step
    def receive(self) -> bool:
        """Receives what the socket has, up to a limit; returns whether it had anything."""
        num_bytes = self.sock.recv_into(self.stream.space()[:MOST_BYTES])
        if num_bytes > 0:
            self.stream.advance(num_bytes)
        else:
            where = " in the middle of a message" if self.stream.inside_message else ""
            self.end("it left the group" if self.stream.said_goodbye else f"it closed the connection{where}")
        return num_bytes > 0

    def refuse(self, data: bytes) -> None:
        """Sends a refusal. A sender that has not read hundreds of them is disconnected instead."""
        try:
            self.sock.send(data, NO_SIGPIPE)
        except OSError:
            self.end("it does not read what is refused; the connection was closed")


class OutgoingConnection(_MessageConnection[OutStream]):
    """The connection on which messages go to `peer`.

    Attributes:
        refusals: refusals of messages that were sent completely; the next operations with the peer raise them.
        refusals_read_at: when a sender last read refusals, in seconds on the monotonic clock.
    """

    def __init__(self, peer: int, stream: OutStream, on_end: Callable[[str], None]) -> None:
        super().__init__(peer, stream, on_end)
        self.refusals: deque[tuple[Header, Header]] = deque(maxlen=16)
        self.refusals_read_at = 0.0
        self._refusal_bytes = bytearray()

    @_step
    def send_at_once(self, message: bytes) -> int:
        """Sends a message with nothing before it; returns the number of bytes that were sent."""
        try:
            return self.sock.send(message, NO_SIGPIPE)
        finally:
            self.stream.num_owed = num_owed(self.sock)

    @_step
    def write(self) -> bool:
        """Sends what the socket takes of the stream, if it is open; returns whether that was anything."""
        if not (self.is_open and self.stream.queue):
            return False
        try:
            self.stream.advance(self.sock.sendmsg(self.stream.parts(), (), NO_SIGPIPE))
        finally:
            self.stream.num_owed = num_owed(self.sock)
        return True

    @_step
    def read_refusals(self) -> list[tuple[Header, Header]]:
        """Returns the refusals that came since the last call."""
        data = self.sock.recv(_REFUSALS_READ)
        if not data:
            self.end("it closed the connection")
        self._refusal_bytes += data
        return take_refusals(self._refusal_bytes)

    def say_goodbye(self) -> None:
        """Tells the receiver that nothing follows, if the last message was sent completely."""
        if self.is_open and not self.stream.queue and not self.stream.inside_message:
            with suppress(OSError):  # the peer will see the end of the connection
                self.sock.send(pack_header(MessageFrame.GOODBYE, 0, 0, self.stream.num_sent, 0), NO_SIGPIPE)
