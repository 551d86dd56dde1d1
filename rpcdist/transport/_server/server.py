"""The one gRPC server of a process: routes, checks every caller, and answers health and reflection."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from rpcdist._proto import rpc_pb2
from rpcdist.errors import AuthenticationFailed, ProtocolViolation, RpcdistError, TransportError
from rpcdist.ids import Identity
from rpcdist.transport._channels.grpc_channel import SERVER_OPTIONS, GrpcServerChannel, refuse
from rpcdist.transport._channels.local_connections import (
    LocalChannel,
    accept_local,
    listen_local,
    local_channels_allowed,
)
from rpcdist.transport.addresses import join_address
from rpcdist.transport.handshake import ReplayWindow, ServerHandshake, verify_request
from rpcdist.transport.link import COUNTER_KEY, PACKAGE, PROOF_KEY, SESSION_KEY
from rpcdist.transport.session import NullHandler, Session, expect_handshake

if TYPE_CHECKING:
    from rpcdist.transport.node import Node

__all__ = ["Method", "Server"]

logger = logging.getLogger(__name__)

HANDSHAKE_LIMIT_S = 10.0
STOP_LIMIT_S = 2.0
MAX_UNPROVEN = 512  # connections in the middle of a handshake; more than a large job opens at once
MAX_UNPROVEN_LOCAL = 64  # the same on the local channel; others wait in the kernel until one of these is done
REFUSALS_PERIOD_S = 60.0
MAX_REFUSALS_SHOWN = 64  # in that time; a stranger cannot fill the disk with log lines

Method = Callable[[Identity, Any], Awaitable[Message]]


class _Proven:
    """What unary calls of a proven peer are checked against."""

    __slots__ = ("key", "peer", "window")

    def __init__(self, key: bytes, peer: Identity) -> None:
        self.key = key
        self.peer = peer
        self.window = ReplayWindow()


class _RefusalLog:
    """Warns of refused connections, of each host and reason once a minute."""

    def __init__(self) -> None:
        self._since = 0.0
        self._shown: set[str] = set()

    def note(self, peer: str, reason: Exception) -> None:
        now = time.monotonic()
        if now - self._since >= REFUSALS_PERIOD_S:
            self._since = now
            self._shown.clear()
        text = f"{peer.rpartition(':')[0]}: {reason}"  # each attempt has another port
        is_news = text not in self._shown and len(self._shown) < MAX_REFUSALS_SHOWN
        if is_news:
            self._shown.add(text)
        logger.log(logging.WARNING if is_news else logging.DEBUG, "refused a connection from %s: %s", peer, reason)


class _Collector:
    """Stands in for a server where a library wants to register handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class Server(grpc.GenericRpcHandler):
    """Lives on the I/O loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._listeners: dict[int, grpc.aio.Server] = {}  # by port
        self._local_tasks: dict[int, asyncio.Task[Any]] = {}
        self._local_slots = asyncio.Semaphore(MAX_UNPROVEN_LOCAL)
        self._num_unary = 0
        self._unary_done = asyncio.Event()
        self._methods: dict[str, Any] = {}
        self._open_methods: dict[str, Any] = {}
        self._services: list[str] = []
        self._proven: dict[bytes, _Proven] = {}
        self._unproven = 0
        self._refusal_log = _RefusalLog()
        self._health = health.aio.HealthServicer()
        self._session_handler: Any = grpc.stream_stream_rpc_method_handler(self._session)

    async def start(self, host: str, port: int) -> int:
        """Binds and serves, perhaps beside a port that is served already; returns the port.

        Raises:
            TransportError: the port is taken.
            ConfigError: `RPCDIST_CHANNELS` has a value that there is not.
        """
        local_channels_allowed()  # before anything is open
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
        self._listen_local(host, bound)
        await self._announce()
        return bound

    def _listen_local(self, host: str, port: int) -> None:
        listener = listen_local(join_address(host, port))
        if listener is not None:
            self._local_tasks[port] = self._node.io.spawn(self._accept_local(listener), f"rpcdist local channel {port}")

    async def drain_unary(self, timeout_s: float) -> None:
        """Waits until the unary calls that are being handled have their replies, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_unary:
                    self._unary_done.clear()
                    await self._unary_done.wait()
        except TimeoutError:
            logger.debug("%s unary calls were cut off", self._num_unary)

    async def stop(self, grace_s: float) -> None:
        """Stops; sessions end at once."""
        for port in list(self._local_tasks):
            await self._stop_local(port)
        listeners, self._listeners = list(self._listeners.values()), {}
        if listeners:
            await self._health.enter_graceful_shutdown()
            await asyncio.gather(*(server.stop(grace_s) for server in listeners))

    async def stop_port(self, port: int, grace_s: float) -> None:
        """Stops one listener; the sessions that came through it end."""
        await self._stop_local(port)
        server = self._listeners.pop(port, None)
        if server is not None:
            await server.stop(grace_s)

    async def _stop_local(self, port: int) -> None:
        task = self._local_tasks.pop(port, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=STOP_LIMIT_S)

    async def add_service(self, descriptor: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        """Serves the unary methods of a service; replaces what was registered under its name."""
        for method in descriptor.methods:
            if method.name in methods:
                request_type = GetMessageClass(method.input_type)
                path = f"/{descriptor.full_name}/{method.name}"
                self._methods[path] = self._unary(path, request_type, methods[method.name])
        if descriptor.full_name not in self._services:
            self._services.append(descriptor.full_name)
        await self._announce()

    async def _announce(self) -> None:
        names = [f"{PACKAGE}.Rpc", *self._services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        collector: Any = _Collector()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, collector)
        servicer = reflection.aio.ReflectionServicer(sorted(set(names)))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, collector)
        self._open_methods = collector.handlers
        for name in names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    # ------------------------------------------------------------ routing

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        if path == f"/{PACKAGE}.Rpc/Session":
            return self._session_handler
        return self._methods.get(path) or self._open_methods.get(path)

    def _unary(self, path: str, request_type: type[Message], method: Method) -> Any:
        async def handle(data: bytes, context: Any) -> bytes:
            proven = self._check(path, context.invocation_metadata())
            if proven is None:
                await refuse(context, f"{path} needs a proven session; open {PACKAGE}.Rpc/Session first")
                raise AssertionError("unreachable")
            try:
                request = request_type.FromString(data)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request of {path} cannot be parsed")
            self._num_unary += 1
            try:
                reply = await method(proven.peer, request)
            except RpcdistError as exc:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(exc))
            except Exception as exc:
                logger.exception("the handler of %s failed", path)
                await context.abort(grpc.StatusCode.INTERNAL, repr(exc))
            finally:
                self._num_unary -= 1
                self._unary_done.set()
            return reply.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(handle)

    def _check(self, path: str, metadata: Any) -> _Proven | None:
        values = dict(metadata)
        proven = self._proven.get(values.get(SESSION_KEY, b""))
        counter = values.get(COUNTER_KEY, "")
        if proven is None or not counter.isascii() or not counter.isdigit() or len(counter) > 18:
            return None
        if not verify_request(proven.key, path, int(counter), values.get(PROOF_KEY, b"")):
            return None
        return proven if proven.window.accept(int(counter)) else None

    # ------------------------------------------------------------ sessions

    async def _session(self, _requests: Any, context: Any) -> None:
        """A session on gRPC."""
        stream = GrpcServerChannel(context, context.peer())
        if self._unproven >= MAX_UNPROVEN:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many handshakes at once; try again")
        handshake = await self._admit(stream, context.peer(), lambda reason: refuse(context, reason))
        if handshake is not None:
            await self._serve(stream, handshake)

    async def _accept_local(self, listener: socket.socket) -> None:
        """Takes sessions from this host until it is cancelled; then ends them."""
        sessions: set[asyncio.Task[Any]] = set()
        try:
            while True:
                await self._local_slots.acquire()
                try:
                    stream = await accept_local(listener)
                except BaseException:
                    self._local_slots.release()
                    raise
                task = self._node.io.spawn(self._local_session(stream), "rpcdist local session")
                sessions.add(task)
                task.add_done_callback(sessions.discard)
        finally:
            listener.close()
            for task in sessions:
                task.cancel()
            if sessions:
                await asyncio.wait(sessions, timeout=STOP_LIMIT_S)

    async def _local_session(self, stream: LocalChannel) -> None:
        """A session on the local channel."""

        async def turn_away(reason: str) -> None:
            stream.abort(reason)

        try:
            try:
                handshake = await self._admit(stream, "a process of this host", turn_away)
            finally:
                self._local_slots.release()
            if handshake is not None:
                await self._serve(stream, handshake)
        finally:
            stream.abort("the connection was closed")

    async def _admit(
        self, stream: GrpcServerChannel | LocalChannel, peer: str, turn_away: Callable[[str], Awaitable[None]]
    ) -> ServerHandshake | None:
        """Lets the peer prove itself; None if it did not."""
        self._unproven += 1
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                return await self._prove(stream)
        except (AuthenticationFailed, ProtocolViolation) as exc:
            self._refusal_log.note(peer, exc)
            await turn_away(str(exc))
        except TimeoutError:
            await turn_away(f"the handshake took longer than {HANDSHAKE_LIMIT_S} s")
        except TransportError:
            pass  # the peer went away before it proved anything
        finally:
            self._unproven -= 1
        return None

    async def _prove(self, stream: GrpcServerChannel | LocalChannel) -> ServerHandshake:
        node = self._node
        handshake = ServerHandshake(
            node.token, node.job, node.identity, node.refusal_for, token_source=node.token_source
        )
        while not handshake.done:
            envelope = expect_handshake(await stream.read())
            answer = handshake.receive(envelope.handshake)
            if answer is not None:
                await stream.write(rpc_pb2.Envelope(handshake=answer).SerializeToString())
            handshake.check()
        return handshake

    async def _serve(self, stream: GrpcServerChannel | LocalChannel, handshake: ServerHandshake) -> None:
        peer, keys, role = handshake.peer, handshake.session, handshake.role
        handler = await self._node.session_handler(role) or NullHandler()
        session = Session(
            self._node.io,
            stream,
            peer,
            role=role,
            id=keys.session_id,
            handler=handler,
            silence_limit_s=self._node.options.peer_timeout_s,
            by_me=False,
        )
        self._proven[keys.session_id] = _Proven(keys.key, peer)
        self._node.sessions.add(session)
        started = time.monotonic()
        try:
            await session.run()
        finally:
            del self._proven[keys.session_id]
            self._node.sessions.discard(session)
            logger.debug("session from %s ended after %.1f s", peer.name, time.monotonic() - started)
        await stream.end()
