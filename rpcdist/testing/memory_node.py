"""A worker's place on a network in memory: it opens connections to the others, and takes theirs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from rpcdist._proto import handshake_pb2
from rpcdist.backoff import backoff
from rpcdist.deadline import Deadline
from rpcdist.errors import AuthenticationFailed, ConnectFailed, DeadlineExceeded
from rpcdist.ids import Identity, new_incarnation
from rpcdist.testing.memory_channel import MemoryChannel, Path, channel_pair
from rpcdist.time_limits import CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, LINK_CLOSE_LIMIT_S, NODE_STOP_LIMIT_S
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.identities import identity_to_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.records import Records
from rpcdist.transport.roles import Roles
from rpcdist.transport.session import NullHandler, Session, SessionHandler

__all__ = ["MemoryConnection", "MemoryNode", "Wires"]

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=Message)
Method = Callable[[Identity, Any], Awaitable[Message]]


class Wires(Protocol):
    """What a node needs of the network."""

    def register(self, node: MemoryNode) -> str:
        """A free address for a node that begins to serve."""

    def node_at(self, caller: MemoryNode, address: str) -> MemoryNode | None:
        """Who serves at an address, if the caller can reach it."""

    def path(self, source: MemoryNode, target: MemoryNode) -> Path:
        """What happens to what `source` sends to `target`."""


class MemoryNode:
    """See `rpcdist.rpc._peers.network.Network`, which it implements.

    Args:
        wires: the network.
        io: the I/O loop of the network.
        name: of the worker that will live here.
        peer_timeout_s: silence after which a peer is declared lost, in seconds.

    Attributes:
        identity: who the worker is to others; set when it joins a job.
        address: where it is served, or None.
    """

    def __init__(self, wires: Wires, io: IoLoop, name: str, peer_timeout_s: float) -> None:
        self.name = name
        self.io = io
        self.identity = Identity(name, -1, new_incarnation())
        self.address: str | None = None
        self.num_silent = 0
        self.roles = Roles(io)
        self.services: dict[tuple[str, str], Method] = {}
        self._wires = wires
        self._silence_limit_s = peer_timeout_s
        self._sessions: dict[Session, MemoryChannel] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MemoryNode {self.name} at {self.address} [{len(self._sessions)} sessions]>"

    @property
    def records(self) -> Records:
        return Records(Credentials(b"a network in memory has no token", "memory", self.identity))

    # ------------------------------------------------------------ any thread

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return self.io.run(coroutine, timeout_s)

    def serve(self, host: str, port: int) -> str:
        if self.address is None:
            self.address = self._wires.register(self)
        return self.address

    def expect_role(self, role: str) -> None:
        self.roles.expect(role)

    def handle_role(
        self, role: str, handler: SessionHandler | None, refuse: Callable[[Identity], str | None] | None = None
    ) -> None:
        self.roles.handle(role, handler, refuse)

    def add_service(self, descriptor: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        self.services.update({(descriptor.name, method): handler for method, handler in methods.items()})

    def release(self) -> None:
        """The worker has left: its address answers no more."""
        self.io.run(self.close("the peer shut down"), NODE_STOP_LIMIT_S)

    # ------------------------------------------------------------ I/O loop

    async def close(self, reason: str) -> None:
        """Ends all connections, and refuses new ones in both directions."""
        self.address = None
        self._is_closed = True
        sessions = list(self._sessions)
        for session in sessions:
            session.close(reason)
        await asyncio.gather(*(session.ended(LINK_CLOSE_LIMIT_S) for session in sessions))

    def sessions_with(self, other: MemoryNode) -> list[tuple[Session, MemoryChannel]]:
        """The connections with another worker, in both directions, and this end of their channels."""
        return [item for item in self._sessions.items() if item[0].peer == other.identity]

    async def connect(
        self,
        address: str,
        role: str,
        timeout_s: float,
        handler: SessionHandler | None = None,
        expected: Identity | None = None,
        retry: bool = True,
    ) -> MemoryConnection:
        if self._is_closed:
            raise ConnectFailed(address, "this process has ended")
        target = await self._find(address, Deadline.after(timeout_s), timeout_s, retry)
        there, back = self._wires.path(self, target), self._wires.path(target, self)
        await asyncio.sleep(there.delay_s + back.delay_s)
        if expected is not None and target.identity != expected:
            raise AuthenticationFailed(f"{address} is {target.identity.name} now, not {expected.name} as it was")
        hello = handshake_pb2.Hello(role=role, identity=identity_to_proto(self.identity))
        taker = await target.roles.handler(role) or NullHandler()
        if (refusal := target.roles.refusal(hello)) is not None:
            raise AuthenticationFailed(refusal)
        if self._wires.node_at(self, address) is not target:  # the connection was cut before it stood
            raise ConnectFailed(address, "connection refused")
        near, far = channel_pair(there, back)
        id = secrets.token_bytes(16)
        target.open_session(far, self.identity, role, id, taker, by_me=False)
        session = self.open_session(near, target.identity, role, id, handler or NullHandler(), by_me=True)
        return MemoryConnection(session, self, target, self._wires)

    async def _find(self, address: str, deadline: Deadline, timeout_s: float, retry: bool) -> MemoryNode:
        pauses = backoff(CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S, deadline)
        while True:
            target = self._wires.node_at(self, address)
            if target is not None:
                if not (self._wires.path(self, target).drops or self._wires.path(target, self).drops):
                    return target
                await asyncio.sleep(deadline.remaining_s())
                raise ConnectFailed(address, "nobody answered there", timeout_s)
            if not retry or deadline.expired():
                raise ConnectFailed(address, "connection refused", timeout_s)
            await asyncio.sleep(next(pauses))

    def open_session(
        self, channel: MemoryChannel, peer: Identity, role: str, id: bytes, handler: SessionHandler, *, by_me: bool
    ) -> Session:
        """Begins a session over one end of a channel."""
        limit_s = self._silence_limit_s
        session = Session(
            self.io, channel, peer, role=role, id=id, handler=handler, silence_limit_s=limit_s, by_me=by_me
        )
        self._sessions[session] = channel
        task = self.io.spawn(session.run(), f"rpcdist session of {self.name} with {peer.name}")
        task.add_done_callback(lambda _: self._sessions.pop(session, None))
        return session


class MemoryConnection:
    """A connection that a node opened; see `rpcdist.rpc._peers.network.Connection`."""

    def __init__(self, session: Session, near: MemoryNode, far: MemoryNode, wires: Wires) -> None:
        self.session = session
        self._near = near
        self._far = far
        self._wires = wires

    async def unary(
        self, service: str, method: str, request: Message, reply_type: type[ReplyT], timeout_s: float | None
    ) -> ReplyT:
        there, back = self._wires.path(self._near, self._far), self._wires.path(self._far, self._near)
        calling = asyncio.ensure_future(self._call(service, method, request, reply_type, there, back))
        ended = asyncio.ensure_future(self.session.ended(float("inf")))
        try:
            await asyncio.wait({calling, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            if self.session.closed_reason is not None:
                raise ConnectFailed(str(self._far.address), self.session.closed_reason)
            raise DeadlineExceeded(f"{service}.{method} was not answered within {timeout_s} s")
        finally:
            calling.cancel()
            ended.cancel()

    async def _call(
        self, service: str, method: str, request: Message, reply_type: type[ReplyT], there: Path, back: Path
    ) -> ReplyT:
        copy = type(request).FromString(request.SerializeToString())
        await asyncio.sleep(there.delay_s)
        if there.drops:
            await asyncio.Event().wait()
        reply = await self._far.services[service, method](self._near.identity, copy)
        await asyncio.sleep(back.delay_s)
        if back.drops:
            await asyncio.Event().wait()
        return reply_type.FromString(reply.SerializeToString())

    async def close(self, timeout_s: float = LINK_CLOSE_LIMIT_S) -> None:
        self.session.close("closed at this end")
        await self.session.ended(timeout_s)
