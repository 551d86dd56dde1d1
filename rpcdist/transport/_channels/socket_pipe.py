"""The handshake's messages on a raw socket: four bytes of length, little endian, and the message.

Exactly these bytes are read and never more, so the socket can be given to anybody afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

from rpcdist.errors import ProtocolViolation, TransportError
from rpcdist.transport.handshake import MAX_HANDSHAKE_BYTES

__all__ = ["SocketPipe"]

_LENGTH: Final = struct.Struct("<I")


class SocketPipe:
    """See `HandshakePipe`.

    Args:
        connection: connected, not blocking; it stays its owner's.
        address: of the peer, for messages.
    """

    def __init__(self, connection: socket.socket, address: str) -> None:
        self._socket = connection
        self._address = address

    async def read(self) -> bytes | None:
        head = await self._read_exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_HANDSHAKE_BYTES:
            raise ProtocolViolation(f"{self._address} announced a message of {size} bytes before it proved anything")
        return await self._read_exactly(size)

    async def _read_exactly(self, size: int) -> bytes | None:
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < size:
            try:
                more = await loop.sock_recv(self._socket, size - len(data))
            except OSError as exc:
                raise self._broken(exc) from exc
            if not more:
                return None
            data += more
        return data

    async def write(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _LENGTH.pack(len(data)) + data)
        except OSError as exc:
            raise self._broken(exc) from exc

    def _broken(self, exc: OSError) -> TransportError:
        return TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}")
