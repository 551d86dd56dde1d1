"""Turns messages into bytes and back, with pure functions. A channel carries envelopes; an envelope is joined frames.

Every frame begins with the same 28 bytes, little endian, and `size` bytes follow them:

     0        4      5       6         8          12      20          28
     | size   | kind | flags | tensors | function | id    | timeout   | body ...
     | u32    | u8   | u8    | u16     | u32      | u64   | u64, us   |

    kind      used fields                               body
    MESSAGE   none                                      a protobuf `Message`; also a call or reply that is not compact
    CALL      all                                       the fields of the flags, then the arguments
    REPLY     flags, tensors, id                        the fields of the flags, then the result
    CHUNK     function: buffer, id: transfer,           bytes of a large buffer
              timeout: offset
    RETURNED  none                                      numbers (u64) of lent segments that are free again
    PASS      flags; id: pass, timeout: context         the fields of the flags, then the body of a `CompactPass`

    flag      in        announces, in this order
    LARGE     all       transfer (u64), number of large buffers (u16), size (u64) and segment (u64, 0: none) of each
    NAMED     CALL      size (u16) and UTF-8 of the function's name; `function`, if not 0, is its number from now on
    RESULT    CALL      two ids (`NamedReference`): `remote()`
    TARGET    CALL      two ids: a method of that reference, or its value if no function is named
    CONTEXT   CALL      an autograd context (i64)
    CREATED   REPLY     nothing: the callee keeps the result
    VALUE     CALL      nothing: the caller also wants the result; only with RESULT
    VALUE     REPLY     nothing: the body also has the result; only with CREATED
    HISTORY   both      message (i64) and stamp (u64) of the value in the graph of the context
    NESTED    CALL      nothing: a handler of the sender made the call

Functions are numbered per session and direction, 1, 2, 3 and so on, at most `MAX_FUNCTIONS`.

For any input, `parse` returns messages or raises `ProtocolViolation`; it compares every size with the number of bytes
that are there before it uses the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack, unpack
from struct import error as StructError
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation
from rpcdist.transport._framing.calls_in_protobuf import from_protobuf, in_protobuf
from rpcdist.transport._framing.message_parts import parsed
from rpcdist.transport.wire_messages import (
    MAX_NAME_BYTES,
    CallMessage,
    CompactPass,
    Loan,
    NamedReference,
    ReplyMessage,
    WireMessage,
    new_history,
)

CHUNK_BYTES = 1 << 19
"""Payload of one chunk. gRPC carries chunks of this size several times faster than one message of 64 MiB."""
CHUNK_WINDOW_BYTES = 8 << 20
"""Limit on the chunks in flight in one direction of a session. Bytes queued in sockets delay small messages, and gRPC's
own window grows to many MiB; a smaller window makes large messages slower."""
MAX_FRAME_BYTES = 1 << 20
"""A larger message is itself sent in chunks."""
MAX_ENVELOPE_BYTES = 1 << 20
"""The writer starts a new envelope at this size, so no envelope is larger than the sum of this and one frame."""
MAX_FRAMES: Final = 512
"""Limit on the frames of an envelope, which is handled in one piece: between two envelopes, others are read."""
MAX_FUNCTIONS: Final = 4096
"""Limit on numbered functions in one direction of a session; calls of other functions carry the name each time."""

_HEAD: Final = Struct("<IBBHIQQ")
_pack, _unpack = _HEAD.pack, _HEAD.unpack_from
_HEAD_BYTES: Final = _HEAD.size
CHUNK_HEAD_BYTES: Final = _HEAD_BYTES

_MESSAGE, _CALL, _REPLY, _CHUNK, _RETURNED, _PASS = range(1, 7)
_LARGE, _NAMED, _RESULT, _TARGET, _CONTEXT, _HISTORY = 1, 2, 4, 8, 16, 32
_CREATED: Final = 2
_VALUE: Final = 64
_NESTED: Final = 128
_REPLY_FLAGS: Final = _LARGE | _CREATED | _HISTORY | _VALUE
_FLAGS_AT: Final = 5
_PASS_HEAD: Final = Struct("<IBBHIqq")  # like `_HEAD`, with signed ids of pass and context
_PASS_IDS: Final = Struct("<qq")
_ID: Final = Struct("<Q")
_ID_AT: Final = 12

_TRANSFER: Final = Struct("<QH")
_BUFFER: Final = Struct("<QQ")
_NAME_SIZE: Final = Struct("<H")
_IDS: Final = Struct("<qqQqqQ")
_CONTEXT_ID: Final = Struct("<q")
_HISTORY_FORM: Final = Struct("<qQ")


class Chunk(NamedTuple):
    """A part of a large buffer that arrived; `data` is a view of the envelope's bytes."""

    transfer: int
    buffer: int
    offset: int
    data: memoryview


class ReturnedSegments(NamedTuple):
    """Segments that the receiver lent and the sender has stopped using."""

    numbers: Sequence[int]


# ---------------------------------------------------------------- writing


def frame(message: WireMessage) -> bytes:
    """The frame of a message, except a compact call; see `call_frame`."""
    if isinstance(message, CompactPass):
        return pass_frame(message)
    if isinstance(message, ReplyMessage) and message.is_compact:
        return reply_frame(message)
    body = in_protobuf(message).SerializeToString()
    return _pack(len(body), _MESSAGE, 0, 0, 0, 0, 0) + body


def wrapped(data: bytes, transfer: int) -> tuple[bytes, memoryview]:
    """Puts a frame that is too large for an envelope into a buffer; returns the announcing frame and the buffer."""
    body = memoryview(data)[_HEAD_BYTES:]
    return frame(rpc_pb2.Message(transfer=transfer, large=[len(body)], wrapped=True)), body


def call_frame(call: CallMessage, number: int, name: bytes = b"") -> bytes | bytearray:
    """The frame of a call. `want_value` may change the frame of a `remote()` while it is queued.

    Args:
        number: number of the function; 0 if it has none.
        name: name of the function, if the receiver does not know the number.
    """
    body = call.body
    flags = _NESTED if call.is_nested else 0
    if call.large or name or call.context or call.result is not None or call.target is not None:
        parts = []
        if call.large:
            flags |= _LARGE
            parts.append(_transfer_of(call))
        if name:
            flags |= _NAMED
            parts += (_NAME_SIZE.pack(len(name)), name)
        if call.result is not None:
            flags |= _RESULT
            parts.append(_IDS.pack(*call.result))
        if call.target is not None:
            flags |= _TARGET
            parts.append(_IDS.pack(*call.target))
        if call.context:
            flags |= _CONTEXT
            parts.append(_CONTEXT_ID.pack(call.context))
            if call.history is not None:
                flags |= _HISTORY
                parts.append(_HISTORY_FORM.pack(*call.history))
        body = b"".join((*parts, body))
    head = _pack(len(body), _CALL, flags, call.num_tensors, number, call.id, call.timeout_us)
    return head + body if call.result is None else bytearray(head) + body


def reply_frame(reply: ReplyMessage) -> bytes:
    """The frame of a reply."""
    body = reply.body
    flags = 0
    if reply.created:
        flags = _CREATED | _VALUE if reply.has_value else _CREATED
    if reply.history is not None:
        flags |= _HISTORY
        body = _HISTORY_FORM.pack(*reply.history) + body
    if reply.large:
        flags |= _LARGE
        body = _transfer_of(reply) + body
    return _pack(len(body), _REPLY, flags, reply.num_tensors, 0, reply.id, 0) + body


def pass_frame(part: CompactPass) -> bytes:
    """The frame of a part of a backward pass."""
    body = part.body
    flags = 0
    if part.large:
        flags = _LARGE
        body = _transfer_of(part) + body
    return _PASS_HEAD.pack(len(body), _PASS, flags, 0, 0, part.backward, part.context) + body


def want_value(frame: bytearray, call: int) -> bool:
    """Changes the frame of a `remote()` so that its reply includes the result; False if it is another frame."""
    if frame[4] != _CALL or not frame[_FLAGS_AT] & _RESULT or _ID.unpack_from(frame, _ID_AT)[0] != call:
        return False
    frame[_FLAGS_AT] |= _VALUE
    return True


def _transfer_of(message: CallMessage | ReplyMessage | CompactPass) -> bytes:
    segments = {loan.buffer: loan.segment for loan in message.loans}
    sizes = [_BUFFER.pack(size, segments.get(index, 0)) for index, size in enumerate(message.large)]
    return b"".join((_TRANSFER.pack(message.transfer, len(sizes)), *sizes))


def chunk_head(transfer: int, buffer: int, offset: int, size: int) -> bytes:
    """The first bytes of an envelope that carries one chunk; the `size` bytes of the chunk follow."""
    return _pack(size, _CHUNK, 0, 0, buffer, transfer, offset)


def returned_frame(numbers: Sequence[int]) -> bytes:
    """The frame that returns segments to the peer that lent them."""
    size = 8 * len(numbers)
    return _pack(size, _RETURNED, 0, 0, 0, 0, 0) + pack(f"<{len(numbers)}Q", *numbers)


# ---------------------------------------------------------------- reading


def parse(data: bytes | bytearray, names: list[str]) -> list[WireMessage | Chunk | ReturnedSegments]:
    """Reads an envelope.

    Args:
        names: names of the functions that the peer has numbered from 1; new ones are appended.

    Raises:
        ProtocolViolation: the bytes are not an envelope.
    """
    found: list[WireMessage | Chunk | ReturnedSegments] = []
    at, end = 0, len(data)
    try:
        while at < end:
            if len(found) == MAX_FRAMES:
                raise ProtocolViolation(f"an envelope of more than {MAX_FRAMES} frames arrived")
            size, kind, flags, num_tensors, number, id, extra = _unpack(data, at)
            body = at + _HEAD_BYTES
            at = body + size
            if at > end:
                raise ProtocolViolation(f"{end} bytes arrived that are not an envelope: one frame has {size}")
            if kind == _REPLY:
                reply = ReplyMessage(id, b"", num_tensors)
                if flags:
                    body = _read_reply_flags(reply, flags, data, body, at)
                if body < at:
                    reply.body = bytes(data[body:at])
                found.append(reply)
            elif kind == _CALL:
                call = CallMessage(id, "", extra, b"", num_tensors)
                if flags:
                    body = _read_call_flags(call, flags, number, names, data, body, at)
                if not call.function and (number or call.target is None):
                    if not 0 < number <= len(names):
                        raise ProtocolViolation(f"a call of function {number} arrived; the peer has named {len(names)}")
                    call.function = names[number - 1]
                if body < at:
                    call.body = bytes(data[body:at])
                found.append(call)
            elif kind == _PASS:
                backward, context = _PASS_IDS.unpack_from(data, body - _PASS_IDS.size)
                part = CompactPass(context, backward, b"")
                if flags & ~_LARGE:
                    raise ProtocolViolation(f"a part of a backward pass arrived with unknown flags ({flags:#x})")
                if flags:
                    body = _read_large(part, data, body, at)
                part.body = bytes(data[body:at])
                found.append(part)
            elif kind == _MESSAGE:
                found.append(from_protobuf(parsed(rpc_pb2.Message, bytes(memoryview(data)[body:at])), size))
            elif kind == _CHUNK:
                found.append(Chunk(id, number, extra, memoryview(data)[body:at]))
            elif kind == _RETURNED:
                found.append(ReturnedSegments(unpack(f"<{size // 8}Q", data[body:at])))
            else:
                raise ProtocolViolation(f"a frame of an unknown kind ({kind}) arrived")
    except (StructError, DecodeError, UnicodeDecodeError) as exc:
        raise ProtocolViolation(f"{len(data)} bytes arrived that are not an envelope: {exc}") from exc
    return found


def parse_chunk_head(data: bytes | bytearray | memoryview, size: int) -> tuple[int, int, int, int] | None:
    """Transfer, buffer, offset and size of the one chunk that an envelope carries; None for other envelopes.

    Args:
        data: the envelope's first `CHUNK_HEAD_BYTES`, or more.
        size: size of the envelope, in bytes.
    """
    if len(data) < _HEAD_BYTES:
        return None
    chunk_size, kind, _, _, buffer, transfer, offset = _unpack(data)
    if kind != _CHUNK or _HEAD_BYTES + chunk_size != size:
        return None
    return transfer, buffer, offset, chunk_size


def _read_reply_flags(reply: ReplyMessage, flags: int, data: bytes | bytearray, at: int, end: int) -> int:
    """Reads the fields of the flags; returns the offset of the result."""
    if flags & ~_REPLY_FLAGS:
        raise ProtocolViolation(f"a reply arrived with unknown flags ({flags:#x})")
    reply.created = bool(flags & _CREATED)
    if flags & _VALUE:
        if not reply.created:
            raise ProtocolViolation("a reply arrived that has a value, but does not answer a remote()")
        reply.has_value = True
    if flags & _LARGE:
        at = _read_large(reply, data, at, end)
    return _read_history(reply, data, at, end) if flags & _HISTORY else at


def _read_call_flags(
    call: CallMessage, flags: int, number: int, names: list[str], data: bytes | bytearray, at: int, end: int
) -> int:
    """Reads the fields of the flags; returns the offset of the arguments."""
    call.is_nested = bool(flags & _NESTED)
    if flags & _LARGE:
        at = _read_large(call, data, at, end)
    if flags & _NAMED:
        (size,) = _NAME_SIZE.unpack_from(data, at)
        at += _NAME_SIZE.size
        if not 0 < size <= MAX_NAME_BYTES or at + size > end:
            raise ProtocolViolation(f"a function's name of {size} bytes arrived")
        call.function = data[at : at + size].decode()
        at += size
        if number:
            _define(names, number, call.function)
    if flags & _RESULT:
        call.result, at = _read_ids(data, at, end)
    if flags & _VALUE:
        if call.result is None:
            raise ProtocolViolation("a call arrived that asks for a value, but is not a remote()")
        call.wants_value = True
    if flags & _TARGET:
        call.target, at = _read_ids(data, at, end)
    if flags & _CONTEXT:
        (call.context,) = _CONTEXT_ID.unpack_from(data, at)
        at += _CONTEXT_ID.size
    if flags & _HISTORY:
        at = _read_history(call, data, at, end)
    if at > end:
        raise ProtocolViolation("a call arrived whose autograd context is cut off")
    return at


def _define(names: list[str], number: int, name: str) -> None:
    if number != len(names) + 1 or number > MAX_FUNCTIONS:
        raise ProtocolViolation(f"function number {number} was given a name after {len(names)} others")
    names.append(name)


def _read_ids(data: bytes | bytearray, at: int, end: int) -> tuple[NamedReference, int]:
    if at + _IDS.size > end:
        raise ProtocolViolation("a call arrived whose reference is cut off")
    ids: NamedReference = _IDS.unpack_from(data, at)
    return ids, at + _IDS.size


def _read_history(message: CallMessage | ReplyMessage, data: bytes | bytearray, at: int, end: int) -> int:
    after = at + _HISTORY_FORM.size
    if after > end:
        raise ProtocolViolation("a call or a reply arrived whose history is cut off")
    message.history = new_history(_HISTORY_FORM.unpack_from(data, at))
    return after


def _read_large(message: CallMessage | ReplyMessage | CompactPass, data: bytes | bytearray, at: int, end: int) -> int:
    count: int
    message.transfer, count = _TRANSFER.unpack_from(data, at)
    at += _TRANSFER.size
    after = at + count * _BUFFER.size
    if not count or after > end:
        raise ProtocolViolation(f"{count} large buffers were announced in a frame that has no room for their sizes")
    large, loans = [], []
    for index in range(count):
        size, segment = _BUFFER.unpack_from(data, at + index * _BUFFER.size)
        large.append(size)
        if segment:
            loans.append(Loan(index, segment))
    message.large, message.loans = large, loans
    return after
