"""What travels on a raw socket before it is handed over: length-prefixed frames, the handshake and the purpose.

    client                                   server
      handshake messages  <------------->            each: 4 bytes length (big-endian), then a `pb.Handshake`
      purpose             --------------->           length, then UTF-8
      <---------------    answer                     length, then a reason; empty: accepted
      raw bytes           <------------->

Both sides read exactly these bytes and never more, so the socket can be given to anybody afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import AuthenticationFailed, ConfigError, ProtocolViolation
from rpcdist.transport.handshake import MAX_HANDSHAKE_BYTES, ClientHandshake, ServerHandshake
from rpcdist.transport.peer_text import printable

__all__ = ["MAX_PURPOSE_BYTES", "ROLE", "check_purpose", "prove_client", "prove_server"]

ROLE: Final = "collective"
MAX_PURPOSE_BYTES: Final = 512
_MAX_ANSWER_BYTES: Final = 512
_LENGTH: Final = struct.Struct(">I")


def check_purpose(purpose: str) -> str:
    """Returns `purpose`, or raises `ConfigError` if it is not printable text of bounded length."""
    if not purpose or not purpose.isprintable() or len(purpose.encode()) > MAX_PURPOSE_BYTES:
        raise ConfigError(f"a purpose is printable text of up to {MAX_PURPOSE_BYTES} bytes, not {purpose[:80]!r}")
    return purpose


async def prove_client(connection: socket.socket, side: ClientHandshake, purpose: str) -> None:
    """Runs the client's side of everything up to the answer. The caller limits the time.

    Raises:
        AuthenticationFailed, ProtocolViolation, OSError: close the socket.
    """
    await _write_message(connection, side.start())
    await _drive(connection, side)
    await _write_frame(connection, purpose.encode())
    answer = await _read_frame(connection, _MAX_ANSWER_BYTES)
    if answer:
        raise ProtocolViolation(f"the peer refused the connection for {purpose!r}: {printable(answer)}")


async def prove_server(
    connection: socket.socket,
    side: ServerHandshake,
    refusal: Callable[[str], str],
    spoke: Callable[[], None],
) -> str:
    """Runs the server's side of everything up to the answer. The caller limits the time.

    Args:
        connection: not blocking.
        side: the handshake.
        refusal: takes the purpose; returns why the connection is not taken, or nothing.
        spoke: called once the first message was read.

    Returns:
        The purpose.

    Raises:
        AuthenticationFailed, ProtocolViolation, OSError: close the socket.
    """
    await _drive(connection, side, spoke)
    if side.role != ROLE:
        raise AuthenticationFailed(f"the peer wants the role {side.role!r}; only {ROLE!r} is served here")
    purpose = check_purpose(printable(await _read_frame(connection, MAX_PURPOSE_BYTES)))
    reason = refusal(purpose)
    await _write_frame(connection, reason.encode()[:_MAX_ANSWER_BYTES])
    if reason:
        raise ProtocolViolation(reason)
    return purpose


async def _drive(
    connection: socket.socket, side: ClientHandshake | ServerHandshake, spoke: Callable[[], None] | None = None
) -> None:
    while not side.done:
        message = await _read_message(connection)
        if spoke is not None:
            spoke()
            spoke = None
        reply = side.receive(message)
        if reply is not None:
            await _write_message(connection, reply)
        side.check()


async def _read_message(connection: socket.socket) -> pb.Handshake:
    data = await _read_frame(connection, MAX_HANDSHAKE_BYTES)
    message = pb.Handshake()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise ProtocolViolation("a handshake message cannot be parsed; is the peer an rpcdist process?") from exc
    return message


async def _write_message(connection: socket.socket, message: pb.Handshake) -> None:
    await _write_frame(connection, message.SerializeToString())


async def _read_frame(connection: socket.socket, limit_bytes: int) -> bytes:
    (size,) = _LENGTH.unpack(await _read_exactly(connection, _LENGTH.size))
    if size > limit_bytes:
        raise ProtocolViolation(f"a frame of {size} bytes, where {limit_bytes} are allowed; is the peer rpcdist?")
    return await _read_exactly(connection, size)


async def _read_exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        chunk = await loop.sock_recv(connection, size - len(data))
        if not chunk:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        data += chunk
    return data


async def _write_frame(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, _LENGTH.pack(len(data)) + data)
