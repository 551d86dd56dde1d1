"""A connection of a group's watch: messages of JSON on a byte stream, on the I/O loop."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Final

from rpcdist.errors import ProtocolViolation
from rpcdist.time_limits import GROUP_SEND_LIMIT_S, GROUP_SILENCE_LIMIT_S

MAX_MESSAGE_BYTES: Final = 64 * 1024
"""More than the longest failure; a peer cannot make this process reserve more."""

Message = dict[str, object]


class WatchConnection:
    """The connection with one rank. Messages leave in order; one that cannot leave in time ends the connection.

    Args:
        rank: the rank at the other end, in the group.
        sock: connected; the connection's from now on.
    """

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        sock.setblocking(False)
        _notice_silence(sock)

    async def send(self, message: Message) -> None:
        data = json.dumps(message).encode()
        async with self._sending, asyncio.timeout(GROUP_SEND_LIMIT_S):
            await self._loop.sock_sendall(self.sock, len(data).to_bytes(4, "big") + data)

    async def receive(self) -> Message | None:
        """The next message; None at the end of the stream. Waits as long as the peer lives."""
        header = await self._exactly(4)
        if header is None:
            return None
        size = int.from_bytes(header, "big")
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"rank {self.rank} announced a watch message of {size} bytes")
        data = await self._exactly(size)
        try:
            message = None if data is None else json.loads(data)
        except (ValueError, RecursionError) as exc:  # the latter for brackets in brackets
            raise ProtocolViolation(f"rank {self.rank} sent a watch message that is not JSON") from exc
        if message is not None and not isinstance(message, dict):
            raise ProtocolViolation(f"rank {self.rank} sent a watch message that is no object")
        return message

    def has_ended(self) -> bool:
        """Whether the peer has closed it, and nothing is left to receive: `receive` returns soon."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = await self._loop.sock_recv(self.sock, size - len(data))
            if not part:
                return None
            data += part
        return bytes(data)


def integer(message: Message, key: str) -> int:
    """A number of a message. Raises ProtocolViolation when there is none under this key."""
    value = message.get(key)
    if type(value) is not int:
        raise ProtocolViolation(f"a watch message has {value!r} where a number belongs ({key})")
    return value


def _notice_silence(sock: socket.socket) -> None:
    """Lets the kernel end a connection whose peer is cut off, without any help of the processes."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", GROUP_SILENCE_LIMIT_S // 4),
        ("TCP_KEEPINTVL", GROUP_SILENCE_LIMIT_S // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", GROUP_SILENCE_LIMIT_S * 1000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
