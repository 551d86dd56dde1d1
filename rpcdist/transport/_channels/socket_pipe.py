"""The handshake's messages on a raw connection: four bytes of length, little endian, and the message.

Exactly these bytes are read and never more, so the socket can be given to anybody afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from typing import Final

from rpcdist.errors import ProtocolViolation, TransportError
from rpcdist.transport.handshake import MAX_HANDSHAKE_BYTES

__all__ = ["RawPipe", "SocketPipe"]

_LENGTH: Final = struct.Struct("<I")


class RawPipe(ABC):
    """See `HandshakePipe`. The messages, whatever carries their bytes.

    Args:
        address: of the peer, for messages.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    async def read(self) -> bytes | None:
        head = await self._read_exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_HANDSHAKE_BYTES:
            raise ProtocolViolation(f"{self._address} announced a message of {size} bytes before it proved anything")
        return await self._read_exactly(size)

    async def write(self, data: bytes) -> None:
        try:
            await self._write_all(_LENGTH.pack(len(data)) + data)
        except OSError as exc:
            raise self._broken(exc) from exc

    @abstractmethod
    async def _read_exactly(self, size: int) -> bytes | None:
        """So many bytes and no more; None if the connection ends before."""

    @abstractmethod
    async def _write_all(self, data: bytes) -> None:
        """Raises `OSError`."""

    def _broken(self, exc: OSError) -> TransportError:
        return TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}")


class SocketPipe(RawPipe):
    """Of a plain socket.

    Args:
        connection: connected, not blocking; it stays its owner's.
        address: of the peer, for messages.
    """

    def __init__(self, connection: socket.socket, address: str) -> None:
        super().__init__(address)
        self._socket = connection

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

    async def _write_all(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)
