"""A plain port for probes, such as Kubernetes': it says over HTTP that the process serves, to whoever asks, no more.

gRPC's port answers nobody without a certificate of the job, which probes do not have. The answer comes from the I/O
loop, so a process whose loop hangs gives none.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Final

from rpcdist.errors import TransportError
from rpcdist.time_limits import HEALTH_ANSWER_LIMIT_S, LISTENER_STOP_LIMIT_S
from rpcdist.transport._channels.stream_sockets import listen_tcp
from rpcdist.transport._server.port_range import PortRange

logger = logging.getLogger(__name__)

HEALTH_PORT_VARIABLE: Final = "RPCDIST_HEALTH_PORT"

_MAX_CONNECTIONS: Final = 16
_MAX_REQUEST_BYTES: Final = 4096
_ANSWERS: Final = {
    True: b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 8\r\nConnection: close\r\n\r\nserving\n",
    False: b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


class HealthPort:
    """Answers GET and HEAD while it is open, whatever the path. Lives on the I/O loop.

    At most 16 connections are looked at at once, each for `HEALTH_ANSWER_LIMIT_S` and 4096 bytes; others are closed.
    """

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._answering: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = 0  # 0: closed

    def __repr__(self) -> str:
        return f"<HealthPort {self.port or 'closed'}>"

    async def open(self, host: str) -> None:
        """Listens where `RPCDIST_HEALTH_PORT` says, if it says so and nothing does yet.

        Raises:
            ConfigError: the variable is no port and no range of ports.
            TransportError: the port is taken, or all of the range are.
        """
        text = os.environ.get(HEALTH_PORT_VARIABLE, "")
        if not text.strip() or self._server is not None:
            return
        ports = PortRange.of_text(text, HEALTH_PORT_VARIABLE)
        try:
            listener = ports.bind(partial(listen_tcp, host), HEALTH_PORT_VARIABLE)
        except OSError as exc:
            raise TransportError(
                f"cannot listen on {host!r} for health probes: {exc.strerror or exc}. Where a host has several "
                f"processes, {HEALTH_PORT_VARIABLE} is a range of ports, such as '8080-8087'."
            ) from exc
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._answer, sock=listener, limit=_MAX_REQUEST_BYTES)
        logger.info("health probes are answered on %s port %d", host, self.port)

    async def close(self) -> None:
        """Probes are refused from now on, and those that are under way end; bounded."""
        server, self._server, self.port = self._server, None, 0
        if server is not None:
            server.close()
        for writer in self._answering.values():
            writer.transport.abort()  # asyncio reports a task of its server that was cancelled as an error
        if self._answering:
            await asyncio.wait(list(self._answering), timeout=LISTENER_STOP_LIMIT_S)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # asyncio starts one for each connection
        self._answering[task] = writer
        try:
            if len(self._answering) <= _MAX_CONNECTIONS:
                async with asyncio.timeout(HEALTH_ANSWER_LIMIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    method = head.partition(b" ")[0]
                    answer = _ANSWERS[method in (b"GET", b"HEAD")]
                    writer.write(answer.removesuffix(b"serving\n") if method == b"HEAD" else answer)
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            logger.debug("a probe ended without an answer: %r", exc)
        finally:
            self._answering.pop(task, None)
            writer.close()  # the answer is in the kernel by then, or the peer takes none
