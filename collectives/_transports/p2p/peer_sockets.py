"""The two connections between this rank and another, one per direction, each with its stream and non-blocking steps."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from rpcdist.collectives._transports.p2p.byte_streams import InStream, OutStream
from rpcdist.collectives._transports.p2p.message_format import Header, MessageFrame, pack_header, take_refusals
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.errors import ProtocolViolation

__all__ = ["ConnectionEnded", "IncomingConnection", "OutgoingConnection"]

_REFUSALS_READ: Final = 4096
_MOST_BYTES: Final = 1 << 20  # in one read: other threads wait for it

P = ParamSpec("P")
T = TypeVar("T")


class ConnectionEnded(Exception):
    """The connection cannot be used any more; the text says why."""


def _step(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a function on a socket return None when it would block, and raise `ConnectionEnded` for any other error."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except (BlockingIOError, InterruptedError):
            return None
        except ProtocolViolation as exc:
            raise ConnectionEnded(f"it does not follow the protocol ({exc}); the connection was closed") from exc
        except OSError as exc:
            raise ConnectionEnded(f"the connection with it failed: {exc.strerror or exc}") from exc
        except MemoryError as exc:
            raise ConnectionEnded(f"there is no memory to keep its message ({exc}); the connection was closed") from exc

    return run


class _MessageConnection:
    """One of the two.

    Attributes:
        sock: the socket, from `open` on.
        is_open: the socket can be used.
        ended: the reason why the connection cannot be used any more; None while it can.
    """

    sock: socket.socket

    def __init__(self) -> None:
        self.is_open = False
        self.ended: str | None = None

    def open(self, sock: socket.socket) -> None:
        """Takes a connected stream socket; closes it if the connection has ended meanwhile."""
        if self.ended is not None:
            sock.close()
            return
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # a broken socket says so again when it is used
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.is_open = True

    def close(self, reason: str = "the connection was closed here") -> None:
        if self.ended is None:
            self.ended = reason
        if self.is_open:
            self.is_open = False
            self.sock.close()


class IncomingConnection(_MessageConnection):
    """The connection on which messages of `source` come; the leader reads it."""

    def __init__(self, source: int, stream: InStream) -> None:
        super().__init__()
        self.source = source
        self.stream = stream

    @property
    def is_idle(self) -> bool:
        """Whether a message may come, and none has begun."""
        return self.is_open and not (self.stream.inside_message or self.stream.said_goodbye)

    @_step
    def receive(self, space: memoryview) -> int:
        """Receives into this memory; returns the number of bytes, which is not 0."""
        num_bytes = self.sock.recv_into(space)
        if num_bytes == 0:
            where = " in the middle of a message" if self.stream.inside_message else ""
            raise ConnectionEnded(
                "it left the group" if self.stream.said_goodbye else f"it closed the connection{where}"
            )
        return num_bytes

    @_step
    def take(self, num_bytes: int) -> None:
        """Hands so many bytes that have come to the stream."""
        self.stream.advance(num_bytes)

    def read(self) -> bool:
        """Receives what the socket has, up to a limit; returns whether it had anything."""
        num_bytes = self.receive(self.stream.space()[:_MOST_BYTES])
        if num_bytes is not None:
            self.take(num_bytes)
        return num_bytes is not None

    def refuse(self, data: bytes) -> None:
        """Sends a refusal. A sender that has not read hundreds of them is disconnected instead."""
        try:
            self.sock.send(data)
        except OSError:
            self.close()


class OutgoingConnection(_MessageConnection):
    """The connection on which messages go to `peer`.

    Attributes:
        refusals_read_at: when a sender last read refusals, in seconds on the monotonic clock.
        refusals: refusals of messages that were sent completely; the next operations with the peer raise them.
    """

    def __init__(self, peer: int) -> None:
        super().__init__()
        self.peer = peer
        self.stream = OutStream()
        self.refusals: deque[tuple[Header, Header]] = deque(maxlen=16)
        self.refusals_read_at = 0.0
        self._refusal_bytes = bytearray()

    @_step
    def send(self, data: bytes) -> int:
        """Sends a message with nothing before it; returns the number of bytes that were sent."""
        num_sent = self.sock.send(data)
        self.stream.num_sent += num_sent == len(data)
        return num_sent

    @_step
    def write(self) -> list[Request]:
        """Sends from the stream; returns the requests that are sent completely."""
        return self.stream.advance(self.sock.sendmsg(self.stream.parts()))

    @_step
    def read_refusals(self) -> list[tuple[Header, Header]]:
        """Returns the refusals that came since the last call."""
        data = self.sock.recv(_REFUSALS_READ)
        if not data:
            raise ConnectionEnded("it closed the connection")
        self._refusal_bytes += data
        return take_refusals(self._refusal_bytes)

    def say_goodbye(self) -> None:
        """Tells the receiver that nothing follows, if the last message was sent completely."""
        if self.is_open and not self.stream and not self.stream.inside_message:
            with suppress(OSError):  # the peer will see the end of the connection
                self.sock.send(pack_header(MessageFrame.GOODBYE, 0, 0, self.stream.num_sent, 0))
