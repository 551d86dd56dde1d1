"""The two connections between this rank and another, one per direction, each with its stream and non-blocking steps.

A stream converts between the bytes of a connection and messages, without the socket: `InStream` provides the memory for
the next bytes and then takes the number that came; `OutStream` provides the next bytes and then takes the number that
were sent. Neither has a lock: one thread at a time may use them.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from rpcdist.collectives._transports.p2p.requests import (
    GOODBYE,
    HEADER_BYTES,
    REFUSED,
    Header,
    Request,
    Target,
    pack_header,
    take_refusals,
    unpack_header,
)
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket, has_buffered, num_owed

_STAGING_BYTES: Final = (1 << 16) + HEADER_BYTES  # bytes that arrive here are copied once more
_INLINE_BYTES: Final = 1 << 14  # a payload of up to this size is copied in `put`
_MOST_MESSAGES: Final = 16  # in one system call
MOST_BYTES: Final = 1 << 20
"""The limit of bytes in one system call, and in the buffer of a Unix socket. After these, the other direction, other
sockets and other threads have a turn: with 4 MiB, an exchange of 16 MiB between 4 ranks on 2 cores took 1.2x to 1.4x as
long."""


class InStream:
    """Turns bytes into messages. Small messages pass through a buffer, so that one read returns many; most of a large
    message is received directly into its target.

    Args:
        begin: called with the header of each message; returns the target of the payload, or None to drop the payload.
        end: called when the payload is complete.

    Attributes:
        target: the target of the message whose payload is incomplete.
        said_goodbye: whether the peer has left on purpose; no message follows.
    """

    def __init__(self, begin: Callable[[Header], Target | None], end: Callable[[Target], None]) -> None:
        self._begin = begin
        self._end = end
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._num_staged = 0  # bytes in the buffer: the beginning of a header
        self._place: memoryview | None = None  # memory for the rest of a payload that is received directly
        self._num_to_drop = 0
        self.target: Target | None = None
        self.num_messages = 0
        self.said_goodbye = False

    @property
    def inside_message(self) -> bool:
        return self._place is not None or self._num_to_drop > 0 or self._num_staged > 0

    def space(self) -> memoryview:
        """Returns the memory for the next bytes; never empty."""
        return self._staging[self._num_staged :] if self._place is None else self._place

    def advance(self, num_bytes: int) -> None:
        """Processes the bytes that came. Raises `ProtocolViolation`, after which the stream cannot be used."""
        if self._place is not None:
            self._expect(self._place[num_bytes:])
            return
        staged, used = self._staging[: self._num_staged + num_bytes], 0
        while used < len(staged) and (taken := self._take(staged[used:])):
            used += taken
        self._num_staged = len(staged) - used
        if used:
            self._staging[: self._num_staged] = bytes(staged[used:])

    def redirect(self, target: Target) -> None:
        """Moves the current payload to another target: copies the bytes that have come, and receives the rest there."""
        assert self.target is not None and self._place is not None
        num_bytes = len(target.memory) - len(self._place)
        target.memory[:num_bytes] = self.target.memory[:num_bytes]
        self.target, self._place = target, target.memory[num_bytes:]

    def drop_target(self) -> None:
        """Drops the rest of the current payload and forgets its target."""
        if self._place is not None:
            self._num_to_drop = len(self._place)
            self._place = self.target = None

    def _take(self, staged: memoryview) -> int:
        """Takes the bytes of one message from those that have come; returns their number, 0 for too few."""
        if self._num_to_drop:
            dropped = min(len(staged), self._num_to_drop)
            self._num_to_drop -= dropped
            return dropped
        if len(staged) < HEADER_BYTES:
            return 0
        header = unpack_header(staged)
        if self.said_goodbye or header.kind == REFUSED or header.sequence != self.num_messages:
            raise ProtocolViolation(f"expected message {self.num_messages}, got {header!r}")
        if header.kind == GOODBYE:
            self.said_goodbye = True
            return HEADER_BYTES
        self.num_messages += 1
        self.target = self._begin(header)
        if self.target is None:
            self._num_to_drop = header.size_bytes
            return HEADER_BYTES
        payload = staged[HEADER_BYTES : HEADER_BYTES + header.size_bytes]
        place = self.target.memory
        place[: len(payload)] = payload
        self._expect(place[len(payload) :])
        return HEADER_BYTES + len(payload)

    def _expect(self, rest: memoryview) -> None:
        """Sets the memory for the rest of the payload; if that is empty, the payload is complete."""
        self._place = rest
        if not rest:
            target, self.target, self._place = self.target, None, None
            assert target is not None
            self._end(target)


class OutStream:
    """Turns requests into bytes, in the order of `put`.

    Attributes:
        queue: the messages that are not completely sent, each with its payload.
        num_owed: how many of the next bytes the socket has encrypted already, so that they must be sent.
    """

    def __init__(self, sent: Callable[[Request], None]) -> None:
        self._sent = sent
        self.queue: deque[tuple[Request, bytes | memoryview]] = deque()
        self._offset = 0  # how much of the first message was sent, in bytes
        self.num_sent = 0
        self.num_owed = 0

    @property
    def inside_message(self) -> bool:
        """Whether a message was sent in part. If it is dropped then, the stream cannot be used any more."""
        return self._offset + self.num_owed > 0

    def put(self, request: Request, num_sent: int = 0) -> None:
        """Adds a message; a small payload is copied. `num_sent` may exceed 0 only if the queue is empty."""
        payload = request.memory
        self.queue.append((request, bytes(payload) if len(payload) <= _INLINE_BYTES else payload))
        self._offset += num_sent

    def parts(self) -> list[bytes | memoryview]:
        """Returns the next bytes to send; not empty while messages are queued."""
        parts: list[bytes | memoryview] = []
        skip, room = self._offset, MOST_BYTES
        for index, (request, payload) in enumerate(islice(self.queue, _MOST_MESSAGES)):
            for part in (pack_header(*request.header(self.num_sent + index)), payload):
                parts.append(part[skip : skip + room])
                skip = max(0, skip - len(part))
                room -= len(parts[-1])
            if room <= 0:
                break
        return parts

    def advance(self, num_bytes: int) -> None:
        self._offset += num_bytes
        while self.queue and self._offset >= HEADER_BYTES + len(self.queue[0][1]):
            request, payload = self.queue.popleft()
            self._offset -= HEADER_BYTES + len(payload)
            self.num_sent += 1
            self._sent(request)

    def withdraw(self, request: Request) -> bool:
        """Forgets a message. Returns False if a part of it was sent."""
        start = -self._offset
        for index, (other, payload) in enumerate(self.queue):
            if other is request and start >= self.num_owed:
                del self.queue[index]
                return True
            start += HEADER_BYTES + len(payload)
        return False

    def find(self, sequence: int) -> Request | None:
        index = sequence - self.num_sent
        return self.queue[index][0] if 0 <= index < len(self.queue) else None

    def clear(self) -> list[Request]:
        requests = [request for request, _ in self.queue]
        self.queue.clear()
        return requests


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
            self.lacked_memory = True
            reason = f"this rank cannot keep its message ({exc}); the connection was closed here"
        except BaseException:  # from a signal handler: the position in the stream is unknown
            self.end(f"a {function.__name__.partition('_')[0]} was interrupted")
            raise
        self.end(reason)
        return None

    return run


class _MessageConnection(Generic[S]):
    """One direction of the connections with a peer.

    Args:
        on_end: called with the reason when the connection cannot be used any more.

    Attributes:
        sock: the socket, from `open` on.
        ended: the reason why the connection cannot be used any more; None while it can.
        lacked_memory: whether it ended because this rank lacks memory, so that the other one is not lost.
    """

    sock: StreamSocket

    def __init__(self, peer: int, stream: S, on_end: Callable[[str], None]) -> None:
        self.peer = peer
        self.stream = stream
        self._on_end = on_end
        self.is_open = False
        self.ended: str | None = None
        self.lacked_memory = False

    def open(self, sock: StreamSocket) -> None:
        """Takes a connected socket; closes it if this connection has ended meanwhile."""
        if self.ended is not None:
            sock.close()
            return
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            with suppress(OSError):  # it is slower with a small buffer
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        self.sock = sock
        self.is_open = True

    @property
    def has_buffered(self) -> bool:
        """Whether bytes can be read although poll does not report any."""
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
        """Receives the bytes that have arrived, up to a limit; returns whether any had."""
        num_bytes = self.sock.recv_into(self.stream.space()[:MOST_BYTES])
        if num_bytes > 0:
            self.stream.advance(num_bytes)
        else:
            where = " in the middle of a message" if self.stream.inside_message else ""
            self.end("it left the group" if self.stream.said_goodbye else f"it closed the connection{where}")
        return num_bytes > 0

    def refuse(self, data: bytes) -> None:
        """Sends a refusal. Disconnects a sender that has left hundreds of them unread instead."""
        try:
            self.sock.send(data, NO_SIGPIPE)
        except OSError:
            self.end("it does not read the refusals of its messages; the connection was closed")


class OutgoingConnection(_MessageConnection[OutStream]):
    """The connection on which messages go to `peer`.

    Attributes:
        refusals: refusals of completely sent messages; the next operations with the peer raise them.
        refusals_read_at: when a sender last read refusals, in seconds on the monotonic clock.
    """

    def __init__(self, peer: int, stream: OutStream, on_end: Callable[[str], None]) -> None:
        super().__init__(peer, stream, on_end)
        self.refusals: deque[tuple[Header, Header]] = deque(maxlen=16)
        self.refusals_read_at = 0.0
        self._refusal_bytes = bytearray()

    @_step
    def send_at_once(self, message: bytes) -> int:
        try:
            return self.sock.send(message, NO_SIGPIPE)
        finally:
            self.stream.num_owed = num_owed(self.sock)

    @_step
    def write(self) -> bool:
        """Sends as many bytes as the socket takes, if it is open; returns whether it took any."""
        if not (self.is_open and self.stream.queue):
            return False
        try:
            self.stream.advance(self.sock.sendmsg(self.stream.parts(), (), NO_SIGPIPE))
        finally:
            self.stream.num_owed = num_owed(self.sock)
        return True

    @_step
    def read_refusals(self) -> list[tuple[Header, Header]]:
        data = self.sock.recv(_REFUSALS_READ)
        if not data:
            self.end("it closed the connection")
        self._refusal_bytes += data
        return take_refusals(self._refusal_bytes)

    def say_goodbye(self) -> None:
        """Tells the receiver that no message follows, if the last one was completely sent."""
        if self.is_open and not self.stream.queue and not self.stream.inside_message:
            with suppress(OSError):  # the peer sees the end of the connection all the same
                self.sock.send(pack_header(GOODBYE, 0, 0, self.stream.num_sent, 0), NO_SIGPIPE)
