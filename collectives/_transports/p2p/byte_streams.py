"""The bytes of a socket between two ranks as messages, in both directions, without the socket.

`InStream` gives the memory for the next bytes and is told how many came; `OutStream` gives the next bytes and is told
how many were sent. Neither takes a lock: the messenger lets one thread at a time use them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Final

from rpcdist.collectives._transports.memory import memory_at
from rpcdist.collectives._transports.p2p.message_format import (
    HEADER_BYTES,
    REFUSAL_BYTES,
    Header,
    MessageFrame,
    pack_header,
    unpack_header,
    unpack_refusal,
)
from rpcdist.collectives._transports.p2p.requests import PostedReceive, Request, UnexpectedMessage
from rpcdist.errors import ProtocolViolation

__all__ = ["InStream", "OutStream", "RefusalStream", "Target"]

_STAGING_BYTES: Final = 1 << 18
_INLINE_BYTES: Final = 1 << 14  # a payload up to here is copied behind its header
_MOST_PARTS: Final = 16

Target = PostedReceive | UnexpectedMessage


class InStream:
    """Makes messages out of bytes. Small messages pass through a buffer, so that one read brings many; most of a large
    message is received directly into its target.

    Args:
        begin: called with the header of each message; returns the target of its payload, or None to drop it.
        end: called when the payload is complete.

    Attributes:
        num_messages: number of messages that have begun.
        target: the target of the message whose payload is incomplete.
        said_goodbye: the peer has left on purpose; nothing follows.
    """

    def __init__(self, begin: Callable[[Header], Target | None], end: Callable[[Target], None]) -> None:
        self._begin = begin
        self._end = end
        self._staging = bytearray(_STAGING_BYTES)
        self._staging_view = memoryview(self._staging)
        self._staging_address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
        self._first = 0  # start of the staged bytes that are not used yet
        self._last = 0  # and their end
        self._place: memoryview | None = None  # memory for the rest of a payload that is received directly
        self._to_drop = 0
        self.target: Target | None = None
        self.num_messages = 0
        self.said_goodbye = False

    @property
    def inside_message(self) -> bool:
        """Whether the stream is in the middle of a message."""
        return self._place is not None or self._to_drop > 0 or self._first != self._last

    def space(self) -> memoryview:
        """The memory for the next bytes; never empty."""
        return self._staging_view[self._last :] if self._place is None else self._place

    def space_behind(self, num_bytes: int) -> memoryview:
        """The memory behind bytes that have come between two messages, and that `advance` has not taken yet."""
        return self._staging_view[num_bytes:]

    def advance(self, num_bytes: int) -> None:
        """Takes so many bytes that have come. Raises `ProtocolViolation`; the stream cannot be used after that."""
        if self._place is not None:
            if num_bytes < len(self._place):
                self._place = self._place[num_bytes:]
            else:
                self._complete()
            return
        self._last += num_bytes
        while self._step():
            pass
        self._compact()

    def only_message(self, num_bytes: int, code: int, tag: int, size_bytes: int) -> int:
        """Looks whether the bytes that have come, between two messages, are one whole message with this header.

        Returns:
            The address of its payload, which stays there until `space` is filled again. 0 if they are anything else:
            `advance` takes them then.
        """
        if num_bytes != HEADER_BYTES + size_bytes or not self.may_be(num_bytes, code, tag, size_bytes):
            return 0
        self.num_messages += 1
        return self._staging_address + HEADER_BYTES

    def may_be(self, num_bytes: int, code: int, tag: int, size_bytes: int) -> bool:
        """Whether the bytes that have come, between two messages, are the beginning of a message with this header."""
        header = pack_header(MessageFrame.MESSAGE, code, tag, self.num_messages, size_bytes)
        known = min(num_bytes, HEADER_BYTES)
        return not self.said_goodbye and self._staging_view[:known] == header[:known]

    def drop_target(self) -> None:
        """Drops the rest of the current payload and forgets its target."""
        if self._place is not None:
            self._to_drop = len(self._place)
            self._place = self.target = None

    def _step(self) -> bool:
        staged = self._last - self._first
        if self._to_drop:
            dropped = min(staged, self._to_drop)
            self._to_drop -= dropped
            self._first += dropped
            return self._to_drop == 0
        if staged < HEADER_BYTES:
            return False
        header = unpack_header(self._staging, self._first)
        self._first += HEADER_BYTES
        self._start(header)
        return self._place is None

    def _start(self, header: Header) -> None:
        if self.said_goodbye or header.kind == MessageFrame.REFUSED or header.sequence != self.num_messages:
            raise ProtocolViolation(f"expected message {self.num_messages}, got {header}")
        if header.kind == MessageFrame.GOODBYE:
            self.said_goodbye = True
            return
        self.num_messages += 1
        target = self.target = self._begin(header)
        staged = self._last - self._first
        if target is None:
            self._to_drop = header.size_bytes
        elif staged >= header.size_bytes:
            target.fill(self._staging_address + self._first)
            self._first += header.size_bytes
            self._complete()
        else:
            self._start_large(target, staged)

    def _start_large(self, target: Target, staged: int) -> None:
        place = target.space()
        place[:staged] = self._staging_view[self._first : self._last]
        self._first = self._last
        self._place = place[staged:]

    def _complete(self) -> None:
        target, self.target, self._place = self.target, None, None
        assert target is not None
        self._end(target)

    def _compact(self) -> None:
        staged = self._last - self._first
        if staged and self._first:  # a part of a header
            self._staging_view[:staged] = bytes(self._staging_view[self._first : self._last])
        self._first, self._last = 0, staged


class _OutgoingMessage:
    __slots__ = ("body", "head", "num_sent", "payload", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_sent = 0
        self.head = b""  # the header, with the payload if that is small; made when it is the message's turn
        self.payload = b""
        self.body: memoryview | None = None
        if request.size_bytes > _INLINE_BYTES:
            self.body = memory_at(request.address, request.size_bytes)
        elif request.size_bytes:
            self.payload = ctypes.string_at(request.address, request.size_bytes)

    @property
    def num_left(self) -> int:
        return len(self.head) + (0 if self.body is None else len(self.body)) - self.num_sent

    def parts(self, sequence: int) -> list[bytes | memoryview]:
        if not self.head:
            request = self.request
            header = pack_header(MessageFrame.MESSAGE, request.code, request.tag, sequence, request.size_bytes)
            self.head = header + self.payload
        in_head = len(self.head) - self.num_sent
        if in_head > 0:
            head = self.head if self.num_sent == 0 else self.head[self.num_sent :]
            return [head] if self.body is None else [head, self.body]
        assert self.body is not None
        return [self.body[-in_head:]]


class OutStream:
    """Makes bytes out of requests, in the order of `put`.

    Attributes:
        num_sent: number of messages that were sent completely.
        was_cut: the last message was sent in part and then dropped.
    """

    def __init__(self) -> None:
        self._queue: deque[_OutgoingMessage] = deque()
        self.was_cut = False
        self.num_sent = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def inside_message(self) -> bool:
        """Whether the stream is in the middle of a message."""
        return bool(self._queue) and self._queue[0].num_sent > 0

    def put(self, request: Request) -> None:
        """Adds a message. A small payload is copied."""
        self._queue.append(_OutgoingMessage(request))

    def put_begun(self, request: Request, num_sent: int) -> None:
        """Adds a message of which so many bytes were sent already, before all others."""
        begun = _OutgoingMessage(request)
        begun.num_sent = num_sent
        self._queue.appendleft(begun)

    def parts(self) -> list[bytes | memoryview]:
        """Returns the next bytes to send; not empty while there are messages. Stays valid while others are put."""
        first = self._queue[0]
        parts = first.parts(self.num_sent)
        if first.body is None and len(self._queue) > 1:
            for index in range(1, min(len(self._queue), _MOST_PARTS)):
                parts += self._queue[index].parts(self.num_sent + index)
        return parts

    def advance(self, num_bytes: int) -> list[Request]:
        """Takes so many bytes that were sent. Returns the requests that are sent completely."""
        sent: list[Request] = []
        while num_bytes > 0:
            first = self._queue[0]
            taken = min(num_bytes, first.num_left)
            first.num_sent += taken
            num_bytes -= taken
            if first.num_left == 0:
                self.num_sent += 1
                sent.append(self._queue.popleft().request)
        return sent

    def withdraw(self, request: Request) -> bool:
        """Forgets a message. Returns False when it has begun. Must not be called between `parts` and `advance`."""
        for index, outgoing in enumerate(self._queue):
            if outgoing.request is request and outgoing.num_sent == 0:
                del self._queue[index]
                for later in list(self._queue)[index:]:
                    later.head = b""  # it has another sequence number now
                return True
        return False

    def find(self, sequence: int) -> Request | None:
        """Returns the request of a message that is not sent completely."""
        index = sequence - self.num_sent
        return self._queue[index].request if 0 <= index < len(self._queue) else None

    def clear(self) -> list[Request]:
        """Forgets all messages and returns them. After that the stream is of no use if a message had begun."""
        self.was_cut |= self.inside_message
        requests = [outgoing.request for outgoing in self._queue]
        self._queue.clear()
        return requests


class RefusalStream:
    """Makes refusals out of the bytes that come back from the receiver."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[Header, Header]]:
        """Takes bytes and returns the refusals that they complete. Raises `ProtocolViolation`."""
        self._data += data
        refusals = []
        while len(self._data) >= REFUSAL_BYTES:
            refusals.append(unpack_refusal(self._data[:REFUSAL_BYTES]))
            del self._data[:REFUSAL_BYTES]
        return refusals
