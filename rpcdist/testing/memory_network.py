"""A network in memory that delays, drops and cuts on command.

    network = MemoryNetwork()
    network.delay("a", "b", 0.2)     # what a and b send to each other arrives 0.2 s later
    network.drop("a", "b")           # it disappears silently: the peers notice after their `peer_timeout`
    network.cut("a", "b")            # their connections break at once, and new ones are refused
    network.refuse("a", "b")         # new ones are refused, and those that there are stay
    network.heal("a", "b")
    network.break_after("a", "b", 3) # of what a sends to b, three more envelopes arrive; then their connections break

Envelopes, sessions, heartbeats and the lists of members are the product's own; only sockets and the handshake that
proves the job token are left out. Time is real.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from rpcdist.testing.limits import LIMIT_S
from rpcdist.testing.memory_channel import MemoryChannel, Path
from rpcdist.testing.memory_node import MemoryNode
from rpcdist.time_limits import LINK_CLOSE_LIMIT_S
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import Session

__all__ = ["MemoryNetwork"]

T = TypeVar("T")


class MemoryNetwork:
    """Connects the workers of one process. Use it as a context manager; methods may be called on any thread.

    Workers are named, not nodes: a fault between two names also concerns a worker that takes the place of one.
    """

    def __init__(self) -> None:
        self._io = IoLoop("rpcdist-memory")
        self._io.start()
        self._lock = threading.Lock()
        self._ports = count(1)
        self._nodes: dict[str, MemoryNode] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._cuts: set[frozenset[str]] = set()

    def __enter__(self) -> MemoryNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def node(self, name: str, peer_timeout_s: float) -> MemoryNode:
        """A place for a worker; give it to the agent.

        Args:
            name: of the worker.
            peer_timeout_s: silence after which a peer is declared lost, in seconds.
        """
        return MemoryNode(self, self._io, name, peer_timeout_s)

    # ------------------------------------------------------------ faults

    def delay(self, a: str, b: str, seconds: float) -> None:
        """What two workers send to each other arrives so much later, in order."""
        self._run(self._set(a, b, delay_s=seconds))

    def drop(self, a: str, b: str) -> None:
        """What two workers send to each other disappears: each is silent to the other one."""
        self._run(self._set(a, b, drops=True))

    def cut(self, a: str, b: str) -> None:
        """The connections of two workers break, and new ones are refused."""
        self._run(self._cut(a, b))

    def refuse(self, a: str, b: str) -> None:
        """New connections of two workers are refused; those that there are work on, as through some firewalls."""
        self._run(self._refuse(a, b))

    def break_after(self, a: str, b: str, num_envelopes: int) -> threading.Event:
        """Of what `a` sends to `b`, so many more envelopes arrive; with the next one their connections break, once.

        They may connect again at once. So a test can break a connection at each step of what it tests.

        Returns:
            Set when the connections have broken.
        """
        broken = threading.Event()
        self._run(self._break_after(a, b, num_envelopes, broken))
        return broken

    def heal(self, a: str, b: str) -> None:
        """Ends all faults between two workers. Connections that have lost something break, as TCP's do in the end."""
        self._run(self._heal(a, b))

    def kill(self, node: MemoryNode) -> None:
        """A worker's process dies: its connections break, and nobody listens at its address."""
        self._run(node.close("the process was killed"))

    def close(self) -> None:
        """Ends the network; idempotent, bounded."""
        self._io.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._io.run(coroutine, LIMIT_S)

    # ------------------------------------------------------------ I/O loop

    async def _set(self, a: str, b: str, *, delay_s: float | None = None, drops: bool | None = None) -> None:
        for path in (self._path(a, b), self._path(b, a)):
            path.delay_s = path.delay_s if delay_s is None else delay_s
            path.drops = path.drops if drops is None else drops

    async def _refuse(self, a: str, b: str) -> None:
        self._cuts.add(frozenset((a, b)))

    async def _cut(self, a: str, b: str) -> None:
        await self._refuse(a, b)
        await _break([session for session, _ in self._between(a, b)])

    async def _break_after(self, a: str, b: str, num_envelopes: int, broken: threading.Event) -> None:
        path = self._path(a, b)

        def break_now() -> None:
            for session, _ in self._between(a, b):
                session.close("the connection broke")
            path.drops = False  # for those that are made anew
            broken.set()

        path.break_after(num_envelopes, lambda: self._io.call_soon(break_now))

    async def _heal(self, a: str, b: str) -> None:
        self._cuts.discard(frozenset((a, b)))
        await self._set(a, b, delay_s=0.0, drops=False)
        await _break([session for session, channel in self._between(a, b) if channel.has_lost])

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
        """See `Wires`."""
        with self._lock:
            address = f"127.0.0.1:{next(self._ports)}"
            self._nodes[address] = node
            return address

    def node_at(self, caller: MemoryNode, address: str) -> MemoryNode | None:
        """See `Wires`."""
        node = self._nodes.get(address)
        if node is None or node.address is None or frozenset((caller.name, node.name)) in self._cuts:
            return None
        return node

    def path(self, source: MemoryNode, target: MemoryNode) -> Path:
        """See `Wires`."""
        return self._path(source.name, target.name)

    def _path(self, source: str, target: str) -> Path:
        return self._paths.setdefault((source, target), Path())


async def _break(sessions: list[Session]) -> None:
    for session in sessions:
        session.close("the connection broke")
    await asyncio.gather(*(session.ended(LINK_CLOSE_LIMIT_S) for session in sessions))
