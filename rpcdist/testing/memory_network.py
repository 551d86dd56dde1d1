"""A network in memory that delays, drops and cuts on command.

    network = MemoryNetwork()
    network.delay("a", "b", 0.2)     # messages between a and b arrive 0.2 s later
    network.drop("a", "b")           # messages disappear silently: the peers notice after their `peer_timeout`
    network.cut("a", "b")            # the connections break at once, and new ones are refused
    network.refuse("a", "b")         # new connections are refused, and existing ones stay
    network.heal("a", "b")
    network.break_after("a", "b", 3) # three more envelopes from a reach b; then the connections break

Envelopes, sessions, heartbeats and membership lists are the product's own; only sockets and the handshake that
proves the job token are left out. Time is real.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from rpcdist._proto import handshake_pb2
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import AuthenticationFailed, ConnectFailed, DeadlineExceeded, TransportError
from rpcdist.ids import Identity, new_incarnation
from rpcdist.inspection import ChannelFacts, Strangers
from rpcdist.testing.limits import LIMIT_S
from rpcdist.time_limits import CLOSE_LIMIT_S, CONNECTION_CLOSE_LIMIT_S, FIRST_PAUSE_S, LONGEST_PAUSE_S
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.identities import identity_to_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.roles import Roles
from rpcdist.transport.session import NullHandler, Session, SessionHandler


@dataclass(slots=True, eq=False, repr=False)
class Path:
    """The path from one worker to another: delay, loss and cuts of all data on it. Data moves on the I/O loop.

    Attributes:
        delay_s: the delay of all data, in seconds; set on any thread.
        drops: whether data disappears, as behind a firewall that answers nothing; set on any thread.
    """

    delay_s: float = 0.0
    drops: bool = False
    _num_intact: int = 0
    _on_break: Callable[[], object] | None = None
    _under_way: deque[tuple[float, MemoryChannel, bytes | None]] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None

    def break_after(self, num_envelopes: int, on_break: Callable[[], object]) -> None:
        """Lets `num_envelopes` more envelopes arrive; drops the next one and all later ones, and calls `on_break`."""
        self._num_intact = num_envelopes
        self._on_break = on_break  # last, since the loop reads it first

    def carry(self, channel: MemoryChannel, data: bytes | None) -> None:
        """Carries data to the far end of a channel, in order; None is the end of the channel."""
        if self._on_break is not None and data is not None:
            self._num_intact -= 1
            if self._num_intact < 0:
                self.drops = True
                on_break, self._on_break = self._on_break, None
                on_break()
        if self.drops:
            channel.has_lost = True
            return
        due = time.monotonic() + self.delay_s
        if self._under_way:
            due = max(due, self._under_way[-1][0])  # data must not overtake older data when the delay shrinks
        self._under_way.append((due, channel, data))
        if self._timer is None:
            self._deliver()

    def _deliver(self) -> None:
        """Delivers the data that is due, and waits for the rest. A timer of the loop may fire a few ms early."""
        self._timer = None
        while self._under_way:
            wait_s = self._under_way[0][0] - time.monotonic()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._deliver)
                return
            _, channel, data = self._under_way.popleft()
            channel.arrive(data)


class MemoryChannel:
    """One end of a channel; see `Channel`. Used on the I/O loop.

    Args:
        path: carries the data that this end writes.

    Attributes:
        has_lost: whether data for this end has been dropped.
    """

    def __init__(self, path: Path) -> None:
        self.has_lost = False
        self.facts = ChannelFacts("", "", False, "memory")
        self._path = path
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._reason: str | None = None
        self._far: MemoryChannel

    async def read(self) -> bytes | None:
        data = await self._arrived.get()
        if self._reason is not None:
            raise TransportError(self._reason)
        return data

    async def write(self, data: bytes) -> None:
        if self._reason is not None:
            raise TransportError(self._reason)
        self._path.carry(self._far, bytes(data))
        await asyncio.sleep(0)  # the reader gets a turn, as with a socket that is full

    def abort(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._arrived.put_nowait(None)
            self._path.carry(self._far, None)

    def arrive(self, data: bytes | None) -> None:
        """Takes data from the far end; None means that the far end has closed the channel."""
        self._arrived.put_nowait(data)


ReplyT = TypeVar("ReplyT", bound=Message)
Method = Callable[[Identity, Any], Awaitable[Message]]


class MemoryNode:
    """See `rpcdist.rpc._peers.network.Network`, which it implements.

    Args:
        wires: the network.
        io: the I/O loop of the network.
        name: the name of the worker that will live here.
        peer_timeout_s: seconds of silence after which a peer is declared lost.

    Attributes:
        identity: the identity that other workers see; set when the worker joins a job.
        address: the address at which the node serves, or None.
    """

    def __init__(self, wires: MemoryNetwork, io: IoLoop, name: str, peer_timeout_s: float) -> None:
        self.name = name
        self.io = io
        self.identity = Identity(name, -1, new_incarnation())
        self.address: str | None = None
        self.strangers = Strangers()
        self.roles = Roles(io)
        self.run = io.run
        self.handle_role, self.expect_role = self.roles.handle, self.roles.expect
        self.services: dict[tuple[str, str], Method] = {}
        self._wires = wires
        self._silence_limit_s = peer_timeout_s
        self._sessions: dict[Session, MemoryChannel] = {}
        self._is_closed = False

    @property
    def credentials(self) -> Credentials:
        return Credentials(b"a network in memory has no token", "memory", self.identity)

    # ------------------------------------------------------------ any thread

    def serve(self, host: str, port: int) -> str:
        if self.address is None:
            self.address = self._wires.register(self)
        return self.address

    def add_service(self, descriptor: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        self.services.update({(descriptor.name, method): handler for method, handler in methods.items()})

    def release(self) -> None:
        """The worker has left: its address does not answer any more."""
        self.io.run(self.close("the peer shut down"), CLOSE_LIMIT_S)

    # ------------------------------------------------------------ I/O loop

    async def close(self, reason: str) -> None:
        """Ends all connections, and refuses new ones in both directions."""
        self.address = None
        self._is_closed = True
        sessions = list(self._sessions)
        for session in sessions:
            session.close(reason)
        await asyncio.gather(*(session.ended(CONNECTION_CLOSE_LIMIT_S) for session in sessions))

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
        if self._wires.node_at(self, address) is not target:  # the connection was cut before it was established
            raise ConnectFailed(address, "connection refused")
        near, far = MemoryChannel(there), MemoryChannel(back)
        near._far, far._far = far, near
        id = secrets.token_bytes(16)
        target.open_session(far, self.identity, role, id, taker, by_me=False)
        session = self.open_session(near, target.identity, role, id, handler or NullHandler(), by_me=True)
        return MemoryConnection(session, self, target, self._wires)

    async def _find(self, address: str, deadline: Deadline, timeout_s: float, retry: bool) -> MemoryNode:
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
        while True:
            target = self._wires.node_at(self, address)
            if target is not None:
                if not (self._wires.path(self, target).drops or self._wires.path(target, self).drops):
                    return target
                await asyncio.sleep(deadline.remaining_s())
                raise ConnectFailed(address, "no process answered there", timeout_s)
            if not retry or deadline.expired():
                raise ConnectFailed(address, "connection refused", timeout_s)
            await asyncio.sleep(next(pauses))

    def open_session(
        self, channel: MemoryChannel, peer: Identity, role: str, id: bytes, handler: SessionHandler, *, by_me: bool
    ) -> Session:
        """Begins a session over one end of a channel."""
        limit_s = self._silence_limit_s
        session = Session(
            self.io, channel, peer, role=role, id=id, handler=handler, silence_limit_s=limit_s, opened_by_me=by_me
        )
        self._sessions[session] = channel
        task = self.io.spawn(session.run(), f"rpcdist session of {self.name} with {peer.name}")
        task.add_done_callback(lambda _: self._sessions.pop(session, None))
        return session


@dataclass(eq=False, repr=False)
class MemoryConnection:
    """A connection that a node opened; see `rpcdist.rpc._peers.network.Connection`."""

    session: Session
    _near: MemoryNode
    _far: MemoryNode
    _wires: MemoryNetwork

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

    async def close(self, timeout_s: float = CONNECTION_CLOSE_LIMIT_S) -> None:
        self.session.close("closed at this end")
        await self.session.ended(timeout_s)


class MemoryNetwork:
    """Connects the workers of one process. Use it as a context manager; methods may be called on any thread.

    Faults apply to names of workers, not to nodes: a fault between two names also affects a replacement of a worker.
    """

    def __init__(self) -> None:
        self._io = IoLoop("rpcdist-memory")
        self._io.start_thread()
        self._lock = threading.Lock()
        self._ports = count(1)
        self._nodes: dict[str, MemoryNode] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._cuts: set[frozenset[str]] = set()

    def __enter__(self) -> MemoryNetwork:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def node(self, name: str, peer_timeout_s: float) -> MemoryNode:
        """Makes the node of a worker, for its agent.

        Args:
            name: the worker's name.
            peer_timeout_s: seconds of silence after which a peer is declared lost.
        """
        return MemoryNode(self, self._io, name, peer_timeout_s)

    # ------------------------------------------------------------ faults

    def delay(self, a: str, b: str, seconds: float) -> None:
        """Delays messages between two workers; they arrive in order."""
        for path in self._paths_between(a, b):
            path.delay_s = seconds

    def drop(self, a: str, b: str) -> None:
        """Drops messages between two workers: neither hears anything from the other."""
        for path in self._paths_between(a, b):
            path.drops = True

    def cut(self, a: str, b: str) -> None:
        """Breaks the connections of two workers, and refuses new ones."""
        self.refuse(a, b)
        self._io.run(self._break(a, b), LIMIT_S)

    def refuse(self, a: str, b: str) -> None:
        """Refuses new connections of two workers; existing ones continue to work, as through some firewalls."""
        self._cuts.add(frozenset((a, b)))

    def break_after(self, a: str, b: str, num_envelopes: int) -> threading.Event:
        """Lets `num_envelopes` more envelopes from `a` reach `b`; at the next one breaks their connections, once.

        The workers may reconnect at once. So a test can break a connection at each step of an operation.

        Returns:
            An event that is set when the connections have broken.
        """
        broken = threading.Event()
        path = self._path(a, b)

        def break_now() -> None:
            for session, _ in self._between(a, b):
                session.close("the connection broke")
            path.drops = False  # for new connections
            broken.set()

        path.break_after(num_envelopes, lambda: self._io.call_soon(break_now))
        return broken

    def heal(self, a: str, b: str) -> None:
        """Ends all faults between two workers. Connections that have lost something break, as TCP's do in the end."""
        self._cuts.discard(frozenset((a, b)))
        for path in self._paths_between(a, b):
            path.delay_s, path.drops = 0.0, False
        self._io.run(self._break(a, b, only_with_losses=True), LIMIT_S)

    def kill(self, node: MemoryNode) -> None:
        """Simulates the death of a worker's process: its connections break, and its address does not answer."""
        self._io.run(node.close("the process was killed"), LIMIT_S)

    def close(self) -> None:
        """Ends the network; idempotent, bounded."""
        self._io.close()

    # ------------------------------------------------------------ I/O loop

    async def _break(self, a: str, b: str, *, only_with_losses: bool = False) -> None:
        sessions = [session for session, channel in self._between(a, b) if channel.has_lost or not only_with_losses]
        for session in sessions:
            session.close("the connection broke")
        await asyncio.gather(*(session.ended(CONNECTION_CLOSE_LIMIT_S) for session in sessions))

    def _between(self, a: str, b: str) -> Iterator[tuple[Session, MemoryChannel]]:
        """Both ends of the connections of two workers."""
        for one, other in ((a, b), (b, a)):
            for node in self._named(one):
                for far in self._named(other):
                    yield from node.sessions_with(far)

    def _named(self, name: str) -> list[MemoryNode]:
        with self._lock:
            return [node for node in self._nodes.values() if node.name == name]

    # ------------------------------------------------------------ for nodes

    def register(self, node: MemoryNode) -> str:
        """Assigns a free address to a node that begins to serve."""
        with self._lock:
            address = f"127.0.0.1:{next(self._ports)}"
            self._nodes[address] = node
            return address

    def node_at(self, caller: MemoryNode, address: str) -> MemoryNode | None:
        """The node that serves at an address, if the caller can reach it."""
        node = self._nodes.get(address)
        if node is None or node.address is None or frozenset((caller.name, node.name)) in self._cuts:
            return None
        return node

    def path(self, source: MemoryNode, target: MemoryNode) -> Path:
        """The path of messages from `source` to `target`."""
        return self._path(source.name, target.name)

    def _path(self, source: str, target: str) -> Path:
        return self._paths.setdefault((source, target), Path())

    def _paths_between(self, a: str, b: str) -> tuple[Path, Path]:
        return self._path(a, b), self._path(b, a)
