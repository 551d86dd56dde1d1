"""The handshake's messages on a raw connection: four bytes of length, little endian, and the message.

The pipe reads exactly these bytes, so the socket can be handed to any other part afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from typing import Final

from rpcdist.errors import AuthenticationFailed, ProtocolViolation, TransportError
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES
from rpcdist.transport.unix_sockets import peer_process, receive_from
from rpcdist.waiters import wake

_LENGTH: Final = struct.Struct("<I")


class RawPipe(ABC):
    """A `HandshakePipe` on top of a byte stream; subclasses move the bytes.

    Args:
        address: address of the peer, for messages.
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
        """Reads exactly `size` bytes; None if the connection ends earlier."""

    @abstractmethod
    async def _write_all(self, data: bytes) -> None:
        """Writes all bytes. Raises `OSError`."""

    def _broken(self, exc: OSError) -> TransportError:
        return TransportError(f"the connection with {self._address} broke: {exc.strerror or exc}")


class SocketPipe(RawPipe):
    """The pipe of a plain socket. On a Unix socket, every message must come from the process that connected.

    Args:
        connection: connected, not blocking; it still belongs to the caller.
        address: address of the peer, for messages.
    """

    def __init__(self, connection: socket.socket, address: str) -> None:
        super().__init__(address)
        self._socket = connection

    async def _read_exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                more = await self._read_some(size - len(data))
            except AuthenticationFailed:
                raise
            except OSError as exc:
                raise self._broken(exc) from exc
            if not more:
                return None
            data += more
        return data

    async def _read_some(self, size: int) -> bytes:
        while True:
            try:
                if self._socket.family != socket.AF_UNIX:
                    return self._socket.recv(size)
                data, sender = receive_from(self._socket, size)
            except BlockingIOError:
                await until_ready(self._socket, for_writing=False)
                continue
            if data and sender != (peer := peer_process(self._socket)):  # [Note: senders] in unix_sockets
                raise AuthenticationFailed(
                    f"{peer} opened the connection with {self._address}, but {sender} sends on it: a process between "
                    "them relays it"
                )
            return data

    async def _write_all(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)


async def until_ready(connection: StreamSocket, for_writing: bool) -> None:
    """Waits until the loop finds the socket readable, or writable."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    descriptor = connection.fileno()
    if descriptor < 0:
        raise TransportError("the connection was closed")
    (loop.add_writer if for_writing else loop.add_reader)(descriptor, wake, ready)
    try:
        await ready
    finally:
        (loop.remove_writer if for_writing else loop.remove_reader)(descriptor)
