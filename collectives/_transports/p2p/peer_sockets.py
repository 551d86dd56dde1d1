"""The two connections between this rank and another, one per direction, each with its stream and non-blocking steps.

A step that finds that its connection cannot be used any more raises one of `CONNECTION_ENDS`.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from typing import Final

from rpcdist.collectives._transports.p2p.byte_streams import InStream, OutStream
from rpcdist.collectives._transports.p2p.message_format import Header, MessageFrame, pack_header, take_refusals
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.errors import ProtocolViolation

__all__ = ["CONNECTION_ENDS", "ConnectionEnded", "IncomingConnection", "OutgoingConnection", "prepare", "why_it_ended"]

_REFUSALS_READ: Final = 4096
_MOST_BYTES: Final = 1 << 20  # in one read: other threads wait for it


class ConnectionEnded(Exception):
    """The connection cannot be used any more; the text says why."""


CONNECTION_ENDS: Final = (ConnectionEnded, OSError, ProtocolViolation, MemoryError)


def why_it_ended(error: BaseException) -> str:
    """Says in words why a connection ended with one of `CONNECTION_ENDS`."""
    if isinstance(error, ProtocolViolation):
        return f"it does not follow the protocol ({error}); the connection was closed"
    if isinstance(error, MemoryError):
        return f"there is no memory to keep its message ({error}); the connection was closed"
    if isinstance(error, OSError):
        return f"the connection with it failed: {error.strerror or error}"
    return str(error)


def prepare(sock: socket.socket) -> None:
    """Sets the options of a connected stream socket for messages."""
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class IncomingConnection:
    """The connection on which messages of `source` come; the leader reads it.

    Attributes:
        ended: the reason why nothing more comes; None while more may come.
    """

    def __init__(self, sock: socket.socket, source: int, stream: InStream) -> None:
        self.sock = sock
        self.source = source
        self.stream = stream
        self.ended: str | None = None

    def receive(self, space: memoryview) -> int:
        """Receives into this memory; returns the number of bytes, or 0 if none have come."""
        try:
            num_bytes = self.sock.recv_into(space)
        except (BlockingIOError, InterruptedError):
            return 0
        if num_bytes == 0:
            if self.stream.said_goodbye:
                raise ConnectionEnded("it left the group")
            where = " in the middle of a message" if self.stream.inside_message else ""
            raise ConnectionEnded(f"it closed the connection{where}")
        return num_bytes

    def read(self) -> bool:
        """Receives what the socket has, up to a limit, and hands it to the stream; returns whether it had anything."""
        num_bytes = self.receive(self.stream.space()[:_MOST_BYTES])
        if num_bytes:
            self.stream.advance(num_bytes)
        return num_bytes > 0

    def refuse(self, data: bytes) -> None:
        """Sends a refusal. A sender that has not read hundreds of them is disconnected instead."""
        try:
            self.sock.send(data)
        except OSError:
            self.close("the connection was closed here")

    def close(self, reason: str) -> None:
        self.ended = self.ended or reason
        self.sock.close()


class OutgoingConnection:
    """The connection on which messages go to `peer`.

    Attributes:
        sock: the socket; None until it is connected, and when it is closed.
        ended: the reason why nothing can be sent any more; None while it can.
        refusals_read_at: when a sender last read refusals, in seconds on the monotonic clock.
        refusals: refusals of messages that were sent completely; the next operations with the peer raise them.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.sock: socket.socket | None = None
        self.stream = OutStream()
        self.ended: str | None = None
        self.refusals: deque[tuple[Header, Header]] = deque(maxlen=16)
        self.refusals_read_at = 0.0
        self._refusal_bytes = bytearray()

    def open(self, sock: socket.socket) -> None:
        """Takes its socket, unless it has ended meanwhile."""
        if self.ended is None:
            prepare(sock)
            self.sock = sock
        else:
            sock.close()

    def send(self, data: bytes) -> int:
        """Sends a message with nothing before it; returns the number of bytes that were sent. It may end."""
        assert self.sock is not None
        try:
            num_sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            self.close(why_it_ended(exc))
            return 0
        self.stream.num_sent += num_sent == len(data)
        return num_sent

    def write(self) -> list[Request] | None:
        """Sends from the stream; returns the requests that are sent completely, or None if the socket is full."""
        assert self.sock is not None
        try:
            return self.stream.advance(self.sock.sendmsg(self.stream.parts()))
        except (BlockingIOError, InterruptedError):
            return None

    def read_refusals(self) -> list[tuple[Header, Header]]:
        """Returns the refusals that came since the last call."""
        assert self.sock is not None
        try:
            data = self.sock.recv(_REFUSALS_READ)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionEnded("it closed the connection")
        self._refusal_bytes += data
        return take_refusals(self._refusal_bytes)

    def close(self, reason: str, goodbye: bool = False) -> None:
        """Closes; with a goodbye before that if the last message was sent completely."""
        self.ended = self.ended or reason
        if self.sock is None:
            return
        if goodbye and not self.stream and not self.stream.inside_message:
            with suppress(OSError):  # the peer will see the end of the connection
                self.sock.send(pack_header(MessageFrame.GOODBYE, 0, 0, self.stream.num_sent, 0))
        self.sock.close()
        self.sock = None
