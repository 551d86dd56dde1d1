"""The serving side of a process: the gRPC server, the raw listeners, and the routing of connections and calls."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from rpcdist._proto import handshake_pb2
from rpcdist.errors import TransportError
from rpcdist.inspection import Strangers
from rpcdist.own_shortage import own_shortage
from rpcdist.transport._channels.channel import allowed_channels
from rpcdist.transport._channels.grpc_channel import (
    GrpcServerChannel,
    accepted_grpc_ends,
    check_grpc_can_start,
    refuse,
    server_options,
)
from rpcdist.transport._channels.polling_and_signals import may_poll
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._channels.stream_sockets import listen_tcp
from rpcdist.transport._server.admission import Admission, Origin
from rpcdist.transport._server.health_port import HealthPort, standard_handlers
from rpcdist.transport._server.silent_connections import SilentConnections
from rpcdist.transport._server.stream_listeners import StreamListeners
from rpcdist.transport._server.unary_services import Method, UnaryServices
from rpcdist.transport.addresses import PortRange, join_address, why_not_here
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ServerHandshake
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.keys import PACKAGE, SESSION_PATH, ProvenSessions
from rpcdist.transport.roles import SOCKET_ROLE, Roles
from rpcdist.transport.session import NullHandler, Session
from rpcdist.transport.striping import PAYLOAD_TAKER, StripeTaker, num_connections

logger = logging.getLogger(__name__)


class Server:
    """Serves sessions, on gRPC and raw sockets, and unary calls. Lives on the I/O loop.

    Attributes:
        sessions: the open sessions that peers opened.
        ended_traffic: the bytes of ended sessions; see `Session.traffic`.
        health: answers health probes, if the environment asks for it.

    Args:
        silence_limit_s: silence after which a peer is declared lost, in seconds.
        ports: the ports at which it may listen by default.
    """

    def __init__(
        self, io: IoLoop, credentials: Credentials, roles: Roles, silence_limit_s: float, ports: PortRange
    ) -> None:
        self._ports = ports
        self.sessions: set[Session] = set()
        self.ended_traffic: Counter[tuple[str, str]] = Counter()
        self._io = io
        self._credentials = credentials
        self._roles = roles
        self._silence_limit_s = silence_limit_s
        self._listeners: dict[str, grpc.aio.Server] = {}  # by address
        self._services_at: dict[str, UnaryServices] = {}  # services of one listener, by its address
        self._plain_hosts: set[str] = set()  # hosts about which a warning was logged
        self._admission = Admission()
        self._silent = SilentConnections(lambda: self._admission.num_wrong_tokens)
        self._streams = StreamListeners(io, credentials, roles, self._admission, self._serve, ports)
        self._stripes = StripeTaker()
        roles.take_sockets(PAYLOAD_TAKER, self._stripes)
        self._proven = ProvenSessions()
        self._unary = UnaryServices(self._proven, self._calls)
        self._serving = health.aio.HealthServicer()
        self._standard_handlers: dict[str, Any] = {}
        self.health = HealthPort()
        self._session_handler: Any = grpc.stream_stream_rpc_method_handler(self._serve_grpc)

    @property
    def strangers(self) -> Strangers:
        """The refused connections, and those not proven yet."""
        admission = self._admission
        silent = self._silent.num_silent
        return Strangers(admission.num_refused, admission.num_wrong_tokens, silent, admission.num_unproven)

    async def start_serving(self, host: str, port: int) -> str:
        """Binds and serves, possibly in addition to other addresses; returns host:port.

        Raises:
            TransportError: the port is in use, or the address is not one of this machine.
            ConfigError: `RPCDIST_CHANNELS`, `RPCDIST_POLLING` or `RPCDIST_PAYLOAD_CONNECTIONS` has an invalid value, or
                TLS is off where it is required.
        """
        await self._credentials.tls_policy.check_plain(host)
        self._note_plain(host)
        # These three check their variables before anything is open.
        channels = allowed_channels()
        may_poll()
        num_connections()
        check_grpc_can_start()
        server = grpc.aio.server(options=server_options())
        services = UnaryServices(self._proven, self._calls, self._handler)
        server.add_generic_rpc_handlers((services,))
        await self.health.open(host)
        bound = self._bind(server, host, port)
        address = join_address(host, bound)
        self._silent.ports.add(bound)
        if "tcp" in channels:
            self._streams.open_tcp(host)
        if "local" in channels:
            self._streams.open_local(address)
            self._streams.unix_name()  # opened now, not later by a group that shares this node
        await server.start()
        self._listeners[address], self._services_at[address] = server, services
        await self._announce()
        return address

    def _bind(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Binds the port, or one of the allowed ports if it is 0; returns the port."""

        def bind(port: int) -> int:
            place = join_address(host, port)
            try:
                if not self._credentials.tls_policy.encrypts_grpc:
                    return server.add_insecure_port(place)
                return server.add_secure_port(place, self._tls_credentials())  # the credentials serve one port
            except RuntimeError as exc:  # gRPC does not report the reason
                if (shortage := own_shortage()) is not None:
                    raise TransportError(f"cannot listen on {place}: {shortage}") from exc
                listen_tcp(host, port).close()  # raises the reason
                raise OSError(errno.EADDRINUSE, "in use by another process until now") from exc

        try:
            return bind(port) if port else self._ports.bind(bind)
        except TransportError:
            raise
        except OSError as exc:
            raise TransportError(
                f"cannot listen on {host} port {port or self._ports}: {why_not_here(host, exc)}."
            ) from exc

    def _tls_credentials(self) -> Any:
        def begun() -> None:  # on a thread of gRPC
            self._silent.begun()
            self._io.call_soon(self._silent.count)

        return self._credentials.tls.grpc_server_credentials(begun)

    def _calls(self, grpc_peer: str | None) -> None:
        self._silent.calls(None if grpc_peer is None else _origin(grpc_peer))

    async def listen_for_sockets(self, host: str) -> tuple[str, int, str]:
        """Listens for raw sockets; returns address, port, and the name of the Unix socket or ""."""
        self._note_plain(host)
        address, port = self._streams.open_tcp(host)
        return address, port, self._streams.unix_name()

    def _note_plain(self, host: str) -> None:
        """Warns once for each address that is reachable without encryption."""
        plain = self._credentials.tls_policy.plain_beyond_loopback(host)
        if plain is not None and host not in self._plain_hosts:
            self._plain_hosts.add(host)
            logger.warning("%s", plain)

    async def stop(self, grace_s: float) -> None:
        """Stops serving; sessions end at once."""
        self._silent.close()
        await self.health.close()
        await self._streams.stop()
        listeners, self._listeners = list(self._listeners.values()), {}
        self._services_at.clear()
        if listeners:
            await self._serving.enter_graceful_shutdown()  # health checks then report that nothing is served
            await asyncio.gather(*(server.stop(grace_s) for server in listeners))

    async def stop_address(self, address: str, grace_s: float) -> None:
        """Stops the gRPC and Unix listeners of one address, and ends the sessions that came through them."""
        await self._streams.close_local(address)
        server = self._listeners.pop(address, None)
        self._services_at.pop(address, None)
        if server is not None:
            await server.stop(grace_s)

    async def drain_unary(self, timeout_s: float) -> None:
        """See `UnaryServices.drain`."""
        services = (self._unary, *self._services_at.values())
        await asyncio.gather(*(each.drain(timeout_s) for each in services))

    def serve_always(self, descriptor: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        """Serves the unary methods of a service at every address; called before the first one is open."""
        self._unary.add(descriptor, methods)

    async def add_service(
        self, descriptor: ServiceDescriptor, methods: Mapping[str, Method], address: str | None = None
    ) -> None:
        """Serves the unary methods of a service; replaces earlier methods of the same name.

        Args:
            address: the only served address that offers it; None for all addresses.
        """
        (self._unary if address is None else self._services_at[address]).add(descriptor, methods)
        await self._announce()

    async def _announce(self) -> None:
        names = {name for services in (self._unary, *self._services_at.values()) for name in services.names}
        announced = [f"{PACKAGE}.Rpc", *sorted(names), health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._standard_handlers = standard_handlers(self._serving, announced)
        for name in ("", *announced):  # the empty name is the server as a whole
            await self._serving.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _handler(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call at every address."""
        path = details.method
        if path == SESSION_PATH:
            return self._session_handler
        unary = self._unary.handler(path, details.invocation_metadata)
        if unary is None:
            self._silent.calls(None)  # a call by an unproven peer
        return unary or self._standard_handlers.get(path)

    # ------------------------------------------------------------ sessions

    async def _serve_grpc(self, _requests: Any, context: Any) -> None:
        """Serves a session on gRPC until it ends."""
        channel = GrpcServerChannel(context, context.peer())
        self._calls(context.peer())
        ends, tcp_port = accepted_grpc_ends(context), self._streams.tcp_port
        handshake = ServerHandshake(self._credentials, self._grpc_refusal, channel=ends, stream_port=tcp_port)

        async def turn_away(reason: handshake_pb2.Refusal) -> None:
            await refuse(context, reason)

        if await self._admission.admit(channel, _origin(context.peer()), handshake, turn_away):
            await self._serve(channel, handshake)
            await channel.end()

    def _grpc_refusal(self, hello: handshake_pb2.Hello) -> str | None:
        return "gRPC carries no raw sockets" if hello.role == SOCKET_ROLE else self._roles.refusal(hello)

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
            opened_by_me=False,
        )
        if session.striping is not None:
            self._stripes.expect(session.id, peer, session.striping)
        self._proven.add(keys, peer)
        self.sessions.add(session)
        started = time.monotonic()
        try:
            await session.run()
        finally:
            self._proven.remove(keys)
            self._stripes.forget(session.id)
            self.sessions.discard(session)
            self.ended_traffic.update(session.traffic())
            logger.debug("session from %s ended after %.1f s", peer.name, time.monotonic() - started)


def _origin(grpc_peer: str) -> Origin:
    """The origin of a connection, parsed from gRPC's "ipv4:1.2.3.4:567" or "ipv6:%5B::1%5D:567"."""
    host, _, port = unquote(grpc_peer.partition(":")[2]).rpartition(":")
    return Origin(host.strip("[]"), port)
