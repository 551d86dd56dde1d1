"""The standard gRPC services for health and reflection, which any client may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


class _HandlerCollector:
    """Stands in for a server where a library wants to register handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class Introspection:
    """Says which services are there, and that they are served.

    Attributes:
        handlers: gRPC's handlers of the two services, by the path of their methods.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self._health = health.aio.HealthServicer()

    async def announce(self, services: Sequence[str]) -> None:
        """Makes `services`, full names, known, in place of those before."""
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        collector: Any = _HandlerCollector()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, collector)
        servicer = reflection.aio.ReflectionServicer(sorted(set(names)))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, collector)
        self.handlers = collector.handlers
        for name in ("", *names):  # the empty name is the server as a whole
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def shut_down(self) -> None:
        """Says from now on that nothing is served."""
        await self._health.enter_graceful_shutdown()
