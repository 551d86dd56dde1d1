"""The one gRPC server of a process: its listeners, and what becomes of each connection and call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from rpcdist.errors import TransportError
from rpcdist.transport._channels.grpc_channel import SERVER_OPTIONS, GrpcServerChannel, refuse
from rpcdist.transport._channels.local_connections import local_channels_allowed
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._server.admission import Admission
from rpcdist.transport._server.introspection import Introspection
from rpcdist.transport._server.local_listeners import LocalListeners
from rpcdist.transport._server.unary_services import Method, UnaryServices
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ServerHandshake
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.roles import Roles
from rpcdist.transport.session import NullHandler, Session
from rpcdist.transport.unary_proof import PACKAGE, SESSION_PATH, ProvenSessions

__all__ = ["Method", "Server"]

logger = logging.getLogger(__name__)


class Server(grpc.GenericRpcHandler):
    """Serves sessions, on gRPC and on local channels, and unary calls. Lives on the I/O loop.

    Attributes:
        sessions: those that peers opened and that are alive.

    Args:
        io: the loop.
        credentials: what this process proves itself with.
        roles: who takes the sessions.
        silence_limit_s: silence after which a peer is declared lost, in seconds.
    """

    def __init__(self, io: IoLoop, credentials: Credentials, roles: Roles, silence_limit_s: float) -> None:
        self.sessions: set[Session] = set()
        self._io = io
        self._roles = roles
        self._silence_limit_s = silence_limit_s
        self._listeners: dict[int, grpc.aio.Server] = {}  # by port
        self._local_listeners = LocalListeners(io, self._serve_local)
        self._admission = Admission(lambda: credentials.server_handshake(roles.refusal))
        self._proven = ProvenSessions()
        self._unary = UnaryServices(self._proven)
        self._introspection = Introspection()
        self._session_handler: Any = grpc.stream_stream_rpc_method_handler(self._serve_grpc)

    def __repr__(self) -> str:
        counts = f"{len(self.sessions)} sessions, {self._admission.num_unproven} unproven"
        return f"<Server on ports {sorted(self._listeners)} [{counts}]>"

    @property
    def num_unproven(self) -> int:
        """Connections in the middle of a handshake."""
        return self._admission.num_unproven

    async def start(self, host: str, port: int) -> int:
        """Binds and serves, perhaps beside a port that is served already; returns the port.

        Raises:
            TransportError: the port is taken.
            ConfigError: `RPCDIST_CHANNELS` has a value that there is not.
        """
        local_channels_allowed()  # raises, if so, before anything is open
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self,))
        bracketed = f"[{host}]" if ":" in host else host
        try:
            bound = server.add_insecure_port(f"{bracketed}:{port}")
        except RuntimeError as exc:
            raise TransportError(
                f"cannot listen on {host} port {port}: it is in use by another process, or the address is not this "
                f"machine's. Choose another port (MASTER_PORT, or RpcOptions(port=...)), or end its holder."
            ) from exc
        await server.start()
        self._listeners[bound] = server
        self._local_listeners.start(host, bound)
        await self._announce()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Stops; sessions end at once."""
        await self._local_listeners.stop_all()
        listeners, self._listeners = list(self._listeners.values()), {}
        if listeners:
            await self._introspection.shut_down()
            await asyncio.gather(*(server.stop(grace_s) for server in listeners))

    async def stop_port(self, port: int, grace_s: float) -> None:
        """Stops one listener; the sessions that came through it end."""
        await self._local_listeners.stop(port)
        server = self._listeners.pop(port, None)
        if server is not None:
            await server.stop(grace_s)

    async def drain_unary(self, timeout_s: float) -> None:
        """See `UnaryServices.drain`."""
        await self._unary.drain(timeout_s)

    async def add_service(self, descriptor: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        """Serves the unary methods of a service; replaces what was registered under its name."""
        self._unary.add(descriptor, methods)
        await self._announce()

    async def _announce(self) -> None:
        await self._introspection.announce([f"{PACKAGE}.Rpc", *self._unary.names])

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Routes a call; gRPC's name for it."""
        path = handler_call_details.method
        if path == SESSION_PATH:
            return self._session_handler
        return self._unary.handlers.get(path) or self._introspection.handlers.get(path)

    # ------------------------------------------------------------ sessions

    async def _serve_grpc(self, _requests: Any, context: Any) -> None:
        """A session on gRPC; ends when it does."""
        channel = GrpcServerChannel(context, context.peer())
        if self._admission.is_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many handshakes at once; try again")

        async def turn_away(reason: str) -> None:
            await refuse(context, reason)

        handshake = await self._admission.admit(channel, context.peer(), turn_away)
        if handshake is not None:
            await self._serve(channel, handshake)

    async def _serve_local(self, channel: SocketChannel, admitted: Callable[[], None]) -> None:
        """A session on the local channel; ends when it does."""

        async def turn_away(reason: str) -> None:
            channel.abort(reason)

        try:
            try:
                handshake = await self._admission.admit(channel, "a process of this host", turn_away)
            finally:
                admitted()
            if handshake is not None:
                await self._serve(channel, handshake)
        finally:
            channel.abort("the connection was closed")

    async def _serve(self, channel: GrpcServerChannel | SocketChannel, handshake: ServerHandshake) -> None:
        peer, keys, role = handshake.peer, handshake.session, handshake.role
        session = Session(
            self._io,
            channel,
            peer,
            role=role,
            id=keys.session_id,
            handler=await self._roles.handler(role) or NullHandler(),
            silence_limit_s=self._silence_limit_s,
            by_me=False,
        )
        self._proven.add(keys, peer)
        self.sessions.add(session)
        started = time.monotonic()
        try:
            await session.run()
        finally:
            self._proven.remove(keys)
            self.sessions.discard(session)
            logger.debug("session from %s ended after %.1f s", peer.name, time.monotonic() - started)
        await channel.end()
