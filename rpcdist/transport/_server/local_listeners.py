"""Accepts the connections of local channels, beside each port that the gRPC server listens on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rpcdist.time_limits import LISTENER_STOP_LIMIT_S
from rpcdist.transport._channels.local_connections import accept_local, listen_local
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport.addresses import join_address
from rpcdist.transport.io_loop import IoLoop

__all__ = ["MAX_UNPROVEN_LOCAL", "LocalListeners"]

MAX_UNPROVEN_LOCAL = (
    64  # connections in the middle of a handshake; others wait in the kernel until one of these is done
)

ServeLocal = Callable[[SocketChannel, Callable[[], None]], Coroutine[Any, Any, None]]
"""Serves one connection to its end. Calls its second argument once the handshake is over, however that ended."""


class LocalListeners:
    """One listener per port; lives on the I/O loop.

    Args:
        io: the loop.
        serve: serves a connection; cancelled when its listener ends.
    """

    def __init__(self, io: IoLoop, serve: ServeLocal) -> None:
        self._io = io
        self._serve = serve
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._slots = asyncio.Semaphore(MAX_UNPROVEN_LOCAL)

    def start(self, host: str, port: int) -> None:
        """Listens under the name of host:port, where local channels are possible."""
        listener = listen_local(join_address(host, port))
        if listener is not None:
            self._tasks[port] = self._io.spawn(self._accept(listener), f"rpcdist local channel {port}")

    async def stop(self, port: int) -> None:
        """Ends one listener with all connections that came through it; bounded."""
        task = self._tasks.pop(port, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=LISTENER_STOP_LIMIT_S)

    async def stop_all(self) -> None:
        for port in list(self._tasks):
            await self.stop(port)

    async def _accept(self, listener: socket.socket) -> None:
        """Takes connections until it is cancelled; then ends them."""
        sessions: set[asyncio.Task[Any]] = set()
        try:
            while True:
                await self._slots.acquire()
                try:
                    channel = await accept_local(listener)
                except BaseException:
                    self._slots.release()
                    raise
                task = self._io.spawn(self._serve(channel, self._slots.release), "rpcdist local session")
                sessions.add(task)
                task.add_done_callback(sessions.discard)
                task.add_done_callback(partial(_abort, channel))  # cancelled before its first step, it closes nothing
        finally:
            listener.close()
            for task in sessions:
                task.cancel()
            if sessions:
                await asyncio.wait(sessions, timeout=LISTENER_STOP_LIMIT_S)


def _abort(channel: SocketChannel, task: asyncio.Task[Any]) -> None:
    channel.abort("the server stopped")
