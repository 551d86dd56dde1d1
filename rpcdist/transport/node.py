"""A process's place on the network: its I/O loop, its one server, and its links to others."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from rpcdist._proto import handshake_pb2
from rpcdist.errors import ConfigError
from rpcdist.ids import Identity, new_incarnation
from rpcdist.transport import fork
from rpcdist.transport._server.server import Method, Server
from rpcdist.transport.addresses import join_address, split_address
from rpcdist.transport.handshake import identity_from_proto
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.link import Link, open_link
from rpcdist.transport.session import Session, SessionHandler
from rpcdist.transport.token import describe_token_source, job_token

__all__ = ["Node", "NodeOptions", "acquire_node"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

STOP_LIMIT_S = 5.0
ROLE_LIMIT_S = 60.0
LAST_REPLIES_LIMIT_S = 0.5


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings of the transport, fixed when the first user of the node acquires it.

    Attributes:
        token: the job's secret; by default `RPCDIST_TOKEN` or the per-user file.
        job: a name that keeps jobs with one token apart.
        peer_timeout_s: silence after which a peer is declared lost, in seconds.
    """

    token: str | None = None
    job: str = "default"
    peer_timeout_s: float = 10.0


class Node:
    """Use `acquire_node`; there is one per process, shared by the store, collectives and RPC."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.token = job_token(options.token)
        self.token_source = describe_token_source(options.token)
        self.job = options.job
        self.identity = Identity(f"pid-{os.getpid()}.{socket.gethostname()}"[:120], -1, new_incarnation())
        self.io = IoLoop()
        self.links: set[Link] = set()
        self.sessions: set[Session] = set()
        self.address: str | None = None
        self._addresses: list[str] = []
        self._server = Server(self)
        self._handlers: dict[str, SessionHandler] = {}
        self._awaited: dict[str, asyncio.Event] = {}
        self._refusals: dict[str, Callable[[Identity], str | None]] = {}
        self._users = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        counts = f"{len(self.links)} links out, {len(self.sessions)} sessions in"
        return f"<Node {self.identity.name} at {self.address} [{counts}]>"

    # ------------------------------------------------------------ any thread

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Runs a coroutine on the I/O loop and waits; see `IoLoop.run`."""
        return self.io.run(coroutine, timeout_s)

    def serve(self, host: str, port: int, timeout_s: float = 30.0) -> str:
        """Starts the server of this process, if it does not run yet; blocks.

        Everything is served at the first address, `Node.address`. A later caller that needs a certain port (a store at
        MASTER_PORT in a process that is an RPC worker already) gets a second listener for the same services.

        Args:
            host: address to bind.
            port: 0 picks a free one, or takes the one that is served already.
            timeout_s: limit of the start, in seconds.

        Returns:
            host:port as bound.

        Raises:
            TransportError: the port is in use.
        """
        with self._lock:
            if self.address is not None and port == 0:
                return self.address
            for address in self._addresses:
                if split_address(address)[1] == port:
                    return address
            bound = self.run(self._server.start(host, port), timeout_s)
            fork.note_server_port(bound)
            address = join_address(host, bound)
            self._addresses.append(address)
            if self.address is None:
                self.address = address
            return address

    def stop_serving(self, address: str) -> None:
        """Ends a second listener, whose port was asked for; the first one ends with the node. Blocks, bounded."""
        with self._lock:
            if address == self.address or address not in self._addresses:
                return
            self._addresses.remove(address)
        self.run(self._server.stop_port(split_address(address)[1], 0.2), STOP_LIMIT_S)

    def add_service(
        self, descriptor: ServiceDescriptor, methods: Mapping[str, Method], timeout_s: float = 10.0
    ) -> None:
        """Serves methods of a service; see `Server.add_service`. Handlers run on the I/O loop as coroutines."""
        self.run(self._server.add_service(descriptor, methods), timeout_s)

    def handle_role(
        self, role: str, handler: SessionHandler | None, refuse: Callable[[Identity], str | None] | None = None
    ) -> None:
        """Says who takes the messages of sessions that peers open for `role`; None ends that.

        Args:
            role: the connection's purpose.
            handler: its taker.
            refuse: says why a peer may not connect, or None; called on the I/O loop.
        """
        self._handlers.pop(role, None)
        self._refusals.pop(role, None)
        if handler is not None:
            self._handlers[role] = handler
            if refuse is not None:
                self._refusals[role] = refuse
        waiters, self._awaited = self._awaited.get(role), {r: e for r, e in self._awaited.items() if r != role}
        if waiters is not None:
            self.io.call_soon(waiters.set)

    def expect_role(self, role: str) -> None:
        """Says that `handle_role` will follow: peers that connect before are kept waiting instead of being refused."""
        self._awaited[role] = asyncio.Event()

    # ------------------------------------------------------------ I/O loop

    async def connect(
        self,
        address: str,
        role: str,
        timeout_s: float,
        handler: SessionHandler | None = None,
        expected: Identity | None = None,
        retry: bool = True,
    ) -> Link:
        """Opens a link; see `open_link`."""
        return await open_link(
            self, address, role=role, timeout_s=timeout_s, handler=handler, expected=expected, retry=retry
        )

    async def session_handler(self, role: str) -> SessionHandler | None:
        """Who takes the messages of a role; waits, bounded, for one that was announced by `expect_role`."""
        awaited = self._awaited.get(role)
        if awaited is not None:
            try:
                async with asyncio.timeout(ROLE_LIMIT_S):
                    await awaited.wait()
            except TimeoutError:
                logger.warning("a peer waited %s s for the role %r", ROLE_LIMIT_S, role)
        return self._handlers.get(role)

    def refusal_for(self, hello: handshake_pb2.Hello) -> str | None:
        """Why a proven peer is refused for the role that it asks for, or None."""
        refuse = self._refusals.get(hello.role)
        return refuse(identity_from_proto(hello.identity)) if refuse is not None else None

    def note_peer_address(self, address: str) -> None:
        host, port = split_address(address)
        fork.note_peer_port(port, host)

    # ------------------------------------------------------------ life

    def acquire(self) -> Node:
        self._users += 1
        return self

    def release(self) -> None:
        """Gives up one share; the last one stops the server and the loop. Blocks, bounded."""
        global _current
        with _current_lock:
            self._users -= 1
            if self._users > 0:
                return
            if _current is self:
                _current = None
                fork.mark_stopped()
        self._stop()

    def _stop(self) -> None:
        if not fork.in_forked_child():
            try:
                self.run(self._close_all(), STOP_LIMIT_S)
            except Exception:
                logger.warning("the transport did not stop cleanly", exc_info=True)
            self.io.close()

    async def _close_all(self) -> None:
        await self._server.drain_unary(LAST_REPLIES_LIMIT_S)
        for session in list(self.sessions):
            session.close("the peer shut down")
        await asyncio.gather(*(link.close() for link in list(self.links)))
        await self._server.stop(0.2)
        self.address = None


_current: Node | None = None
_current_lock = threading.Lock()


def acquire_node(options: NodeOptions | None = None) -> Node:
    """The node of this process, started if there is none; pair it with `Node.release`.

    Args:
        options: settings for a node that starts now. A node that runs already keeps its own; then a token or job that
            differs is an error.

    Raises:
        ConfigError: the running node was started with another token or job.
        ForkedProcess: this process was forked from one that runs a node.
    """
    global _current
    fork.check_not_forked()
    with _current_lock:
        if _current is None:
            _current = Node(options or NodeOptions())
            _current.io.start()
            fork.mark_running()
        elif options is not None and options.token is not None and job_token(options.token) != _current.token:
            raise ConfigError("this process already communicates with another job token; use one token per process")
        return _current.acquire()


def _stop_at_exit() -> None:
    node = _current
    if node is not None and not fork.in_forked_child():
        node._stop()


atexit.register(_stop_at_exit)
