"""Health: a plain port for probes such as Kubernetes', and gRPC's standard services for health and reflection.

The plain port only reports over HTTP that the process serves. gRPC's port answers no client without a certificate of
the job, which probes do not have. The answer comes from the I/O loop, so a process whose loop hangs does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from rpcdist.errors import TransportError
from rpcdist.time_limits import ATTEMPT_LIMIT_S, CONNECTION_CLOSE_LIMIT_S
from rpcdist.transport._channels.stream_sockets import listen_tcp
from rpcdist.transport.addresses import PortRange

logger = logging.getLogger(__name__)

HEALTH_PORT_VARIABLE: Final = "RPCDIST_HEALTH_PORT"

_MAX_CONNECTIONS: Final = 16
_MAX_REQUEST_BYTES: Final = 4096
_ANSWERS: Final = {
    True: b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 8\r\nConnection: close\r\n\r\nserving\n",
    False: b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


class HealthPort:
    """Answers GET and HEAD for any path while it is open. Lives on the I/O loop.

    It serves at most 16 connections at once, each for `ATTEMPT_LIMIT_S` and 4096 bytes, and closes others.
    """

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._answering: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = 0  # 0: closed

    async def open(self, host: str) -> None:
        """Listens at the port in `RPCDIST_HEALTH_PORT`, if it is set and the port is not open yet.

        Raises:
            ConfigError: the variable is not a port or a range of ports.
            TransportError: the port, or every port of the range, is in use.
        """
        text = os.environ.get(HEALTH_PORT_VARIABLE, "")
        if not text.strip() or self._server is not None:
            return
        ports = PortRange.of_text(text, HEALTH_PORT_VARIABLE)
        try:
            listener = ports.bind(partial(listen_tcp, host), HEALTH_PORT_VARIABLE)
        except OSError as exc:
            raise TransportError(
                f"cannot listen on {host!r} for health probes: {exc.strerror or exc}. If a host has several processes, "
                f"set {HEALTH_PORT_VARIABLE} to a range of ports, such as '8080-8087'."
            ) from exc
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._answer, sock=listener, limit=_MAX_REQUEST_BYTES)
        logger.info("health probes are answered on %s port %d", host, self.port)

    async def close(self) -> None:
        """Refuses further probes, and ends unfinished ones; bounded."""
        server, self._server, self.port = self._server, None, 0
        if server is not None:
            server.close()
        for writer in self._answering.values():
            writer.transport.abort()  # cancelling its task would make asyncio report an error
        if self._answering:
            await asyncio.wait(list(self._answering), timeout=CONNECTION_CLOSE_LIMIT_S)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # asyncio starts one for each connection
        self._answering[task] = writer
        try:
            if len(self._answering) <= _MAX_CONNECTIONS:
                async with asyncio.timeout(ATTEMPT_LIMIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    method = head.partition(b" ")[0]
                    answer = _ANSWERS[method in (b"GET", b"HEAD")]
                    writer.write(answer.removesuffix(b"serving\n") if method == b"HEAD" else answer)
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            logger.debug("a probe ended without an answer: %r", exc)
        finally:
            self._answering.pop(task, None)
            writer.close()  # the kernel has the answer by now, or the peer does not read it


def standard_handlers(servicer: health.aio.HealthServicer, services: Sequence[str]) -> dict[str, Any]:
    """The handlers of gRPC's standard services for health and reflection, by the path of their methods.

    Any client with a certificate may call them. They report `services`, by their full names.
    """
    found: dict[str, Any] = {}

    def collect(service: str, handlers: Mapping[str, Any]) -> None:
        found.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    # It stands in for a server, with the methods by which a library registers its handlers.
    collector: Any = SimpleNamespace(
        add_generic_rpc_handlers=lambda handlers: None, add_registered_method_handlers=collect
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, collector)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(sorted(set(services))), collector
    )
    return found
