"""A bare socket for who cannot speak TLS itself: the I/O loop carries its bytes to and from a TLS connection.

The collectives poll, send and receive on plain sockets, on threads of their own. Between hosts they get one end of a
pair of Unix sockets instead; what they write there is encrypted and sent by the I/O loop, and what comes is decrypted
into it. Buffers are bounded by those of the sockets: who reads slowly stops the sender, as without the bridge.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from contextlib import suppress
from typing import Final

from rpcdist.transport import fork
from rpcdist.transport._channels.socket_pipe import until_ready
from rpcdist.transport._tls.tls_socket import TlsSocket
from rpcdist.transport.io_loop import IoLoop

__all__ = ["bridged"]

logger = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 256 << 10  # carried at once in each direction, before others on the loop have their turn
_MAX_LAST_PIECES: Final = 64  # of such a buffer; more than the kernel keeps for a socket


def bridged(connection: TlsSocket, io: IoLoop) -> socket.socket:
    """The plain end of a TLS connection; call it on the I/O loop, after the handshakes.

    Args:
        connection: owned by the bridge from now on. It is closed when the plain end is, and the other way round.
        io: the loop. When it ends, what the plain end has written is sent as far as there is room.

    Returns:
        A non-blocking socket; the caller closes it.
    """
    inner, outer = socket.socketpair()
    for end in (inner, outer):
        fork.note_socket(end)
        end.setblocking(False)

    def close(task: asyncio.Task[None]) -> None:
        inner.close()
        connection.close()

    # Not by the task itself: cancelled before its first step, it would close nothing.
    io.spawn(_carry(connection, inner), "rpcdist TLS bridge").add_done_callback(close)
    return outer


async def _carry(connection: TlsSocket, inner: socket.socket) -> None:
    ways = [asyncio.ensure_future(_encrypt(connection, inner)), asyncio.ensure_future(_decrypt(connection, inner))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if ways[0].done() and not _is_closed(inner):  # it was shut down for writing only
            await ways[1]
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _encrypt(connection: TlsSocket, inner: socket.socket) -> None:
    """Carries from the plain end; returns at its end, or when the connection broke."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    rest = buffer[:0]
    try:
        while True:
            await until_ready(inner, for_writing=False)
            num_bytes = _received(inner, buffer)
            if num_bytes == 0:
                connection.shutdown(socket.SHUT_WR)
                return
            rest = buffer[: num_bytes or 0]
            while rest:
                try:
                    rest = rest[connection.sendmsg([rest]) :]
                except BlockingIOError:
                    await until_ready(connection, for_writing=True)
    except OSError as exc:
        logger.debug("a TLS connection of a plain socket ended: %s", exc)
    except asyncio.CancelledError:  # this process stops using the network: the last words go, if they can
        with suppress(OSError):
            for _ in range(_MAX_LAST_PIECES):  # a thread that writes on must not hold up the end of the loop
                rest = rest or buffer[: _received(inner, buffer) or 0]
                if not rest:
                    break
                rest = rest[connection.sendmsg([rest]) :]
        raise


async def _decrypt(connection: TlsSocket, inner: socket.socket) -> None:
    """Carries to the plain end; returns when either is at its end."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    try:
        while True:
            if connection.has_buffered:
                await asyncio.sleep(0)
            else:
                await until_ready(connection, for_writing=False)
            try:
                num_bytes = connection.recv_into(buffer)
            except BlockingIOError:
                continue
            if not num_bytes:
                return
            rest = buffer[:num_bytes]
            while rest:
                try:
                    rest = rest[inner.send(rest) :]
                except BlockingIOError:
                    await until_ready(inner, for_writing=True)
    except OSError as exc:
        logger.debug("a TLS connection of a plain socket ended: %s", exc)


def _is_closed(inner: socket.socket) -> bool:
    """Whether the plain end is closed in both directions."""
    poller = select.poll()
    poller.register(inner, 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _received(inner: socket.socket, buffer: memoryview) -> int | None:
    """How many bytes have come; 0 at the end, None if there are none yet."""
    try:
        return inner.recv_into(buffer)
    except BlockingIOError:
        return None
