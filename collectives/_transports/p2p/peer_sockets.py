"""The two connections between this rank and another, one per direction, each with its stream and non-blocking steps."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

from rpcdist.collectives._transports.p2p.byte_streams import InStream, OutStream, RefusalStream
from rpcdist.collectives._transports.p2p.message_format import Header, MessageFrame, pack_header
from rpcdist.errors import ProtocolViolation

__all__ = ["ConnectionEnded", "IncomingConnection", "OutgoingConnection", "prepare"]

_REFUSALS_READ: Final = 4096


class ConnectionEnded(Exception):
    """The connection cannot be used any more; the text says why."""


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

    def receive(self, behind: int = 0) -> int:
        """Receives into the stream's space; returns the number of bytes, or 0 if none have come.

        Args:
            behind: so many bytes were received between two messages, and are not taken yet.

        Raises:
            ConnectionEnded: the connection ended.
        """
        try:
            num_bytes = self.sock.recv_into(self.stream.space_behind(behind) if behind else self.stream.space())
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise ConnectionEnded(f"the connection with it failed: {exc.strerror or exc}") from exc
        if num_bytes == 0:
            raise ConnectionEnded(self._why_it_ended())
        return num_bytes

    def _why_it_ended(self) -> str:
        if self.stream.said_goodbye:
            return "it left the group"
        return f"it closed the connection{' in the middle of a message' if self.stream.inside_message else ''}"

    def refuse(self, data: bytes) -> None:
        """Sends a refusal. A sender that has not read hundreds of them is disconnected instead."""
        try:
            self.sock.send(data)
        except OSError:
            self.close()

    def close(self) -> None:
        self.ended = self.ended or "the connection was closed here"
        self.sock.close()


class OutgoingConnection:
    """The connection on which messages go to `peer`.

    Attributes:
        sock: the socket; None until it is connected.
        busy: a thread is connecting it or writing to it; no other thread may.
        ended: the reason why nothing can be sent any more; None while it can.
        refusals_read_at: when a sender last read refusals, in seconds on the monotonic clock.
        refusals: refusals of messages that were sent completely; the next operations with the peer raise them.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.sock: socket.socket | None = None
        self.stream = OutStream()
        self.busy = False
        self.ended: str | None = None
        self.refusals: deque[tuple[Header, Header]] = deque(maxlen=16)
        self.refusals_read_at = 0.0
        self._refusal_stream = RefusalStream()

    def send(self) -> int:
        """Sends from the stream; returns the number of bytes that were sent, 0 if the socket is full.

        Raises:
            ConnectionEnded: the connection ended.
        """
        assert self.sock is not None
        parts = self.stream.parts()
        try:
            return self.sock.send(parts[0]) if len(parts) == 1 else self.sock.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise ConnectionEnded(f"the connection with it failed: {exc.strerror or exc}") from exc

    def read_refusals(self) -> list[tuple[Header, Header]]:
        """Returns the refusals that came since the last call.

        Raises:
            ConnectionEnded: the connection ended, or the receiver sent something else.
        """
        assert self.sock is not None
        try:
            data = self.sock.recv(_REFUSALS_READ)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as exc:
            raise ConnectionEnded(f"the connection with it failed: {exc.strerror or exc}") from exc
        if not data:
            raise ConnectionEnded("it closed the connection")
        try:
            return self._refusal_stream.feed(data)
        except ProtocolViolation as exc:
            raise ConnectionEnded(f"it does not follow the protocol ({exc}); the connection was closed") from exc

    def close(self) -> None:
        """Sends a goodbye if the last message was sent completely, and closes."""
        self.ended = self.ended or "the connection was closed here"
        if self.sock is None:
            return
        if not self.stream and not self.stream.was_cut:
            try:
                self.sock.send(pack_header(MessageFrame.GOODBYE, 0, 0, self.stream.num_sent, 0))
            except OSError:  # the peer will see the end of the connection
                pass
        self.cut()

    def cut(self) -> None:
        """Closes without a goodbye."""
        self.ended = self.ended or "the connection was closed here"
        if self.sock is not None:
            self.sock.close()
            self.sock = None
