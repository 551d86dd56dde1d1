"""A node: the I/O loop of a process, its server, and its links to other processes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.errors import ConfigError, on_error
from rpcdist.ids import Identity, new_incarnation
from rpcdist.inspection import Strangers
from rpcdist.own_shortage import names_shortage, raise_descriptor_limit
from rpcdist.time_limits import CLOSE_LIMIT_S, GRPC_STOP_GRACE_S, LEAVE_LIMIT_S, PEER_TIMEOUT_S, SLOW_ANSWER_LIMIT_S
from rpcdist.transport import fork
from rpcdist.transport._server.diagnosis import DIAGNOSIS_SERVICE, reach_service
from rpcdist.transport._server.server import Server
from rpcdist.transport._server.unary_services import Method
from rpcdist.transport._tls.tls_policy import TLS_VARIABLE, TlsOptions, TlsPolicy
from rpcdist.transport.addresses import PORTS_VARIABLE, PortRange, split_address
from rpcdist.transport.connector import Connector
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.hub_connector import HubAddress
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.roles import Roles, SocketTaker
from rpcdist.transport.token import describe_token_source, job_token

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Settings of the transport, fixed when a node is made.

    Attributes:
        token: the job's secret; by default `RPCDIST_TOKEN` or the per-user file.
        job: a name that separates jobs with the same token; by default `RPCDIST_JOB`, or "default".
        peer_timeout_s: silence after which a peer is declared lost, in seconds.
        tls: False turns encryption off, which is allowed only on loopback and trusted networks; None follows
            `RPCDIST_TLS`; `TlsOptions` name the process's own certificates.
        ports: the ports at which it listens by default, such as "29600-29700"; None follows `RPCDIST_PORTS`, or lets
            the system pick a port.
    """

    token: str | None = field(default=None, repr=False)  # reprs reach logs
    job: str = field(default_factory=lambda: os.environ.get("RPCDIST_JOB") or "default")
    peer_timeout_s: float = PEER_TIMEOUT_S
    tls: bool | TlsOptions | None = None
    ports: str | None = None


class Node:
    """Wires the parts of the transport. Nothing runs before `start_loop`.

    The parts of a process usually share the node of `acquire_node`. Each further node in a process has its own I/O
    loop, port, identity and token, and ends independently.

    Attributes:
        ports: the ports at which it may listen by default.
        run: runs a coroutine on the I/O loop and waits; see `IoLoop.run`. Any thread.
        connect: opens a link; see `Connector.connect`. On the I/O loop.
        links: the open links to others.
        sessions: the open sessions that peers opened.
        handle_role, expect_role: see `Roles.handle` and `Roles.expect`.
    """

    def __init__(self, options: NodeOptions) -> None:
        raise_descriptor_limit()
        me = Identity(f"pid-{os.getpid()}.{socket.gethostname()}"[:120], -1, new_incarnation())
        self.options = options
        token, source = job_token(options.token), describe_token_source(options.token)
        self.credentials = Credentials(token, options.job, me, source, TlsPolicy.of_environment(options.tls))
        self.io = IoLoop()
        self._addresses: dict[str, int] = {}  # the number of users of each address
        self._roles = Roles(self.io)
        self.ports = PortRange.of_environment(options.ports)
        self._server = Server(self.io, self.credentials, self._roles, options.peer_timeout_s, self.ports)
        self._connector = Connector(self.io, self.credentials, options.peer_timeout_s)
        self._server.serve_always(DIAGNOSIS_SERVICE, {"Reach": reach_service(self._connector.connect)})
        self.run = self.io.run
        self.connect = self._connector.connect
        self.links = self._connector.links
        self.sessions = self._server.sessions
        self.handle_role = self._roles.handle
        self.expect_role = self._roles.expect
        self._num_shares = 0
        self._shares_lock = threading.Lock()
        self._serving_lock = threading.Lock()  # held by `serve` and `stop_serving`, which wait for the loop

    @property
    def address(self) -> str | None:
        """The first address at which it serves; None if it does not serve."""
        return next(iter(self._addresses), None)

    @property
    def strangers(self) -> Strangers:
        """The refused connections, and those whose handshake is not finished; any thread."""
        return self._server.strangers

    @property
    def identity(self) -> Identity:
        """The identity of this process. RPC sets it to name and id of the worker before it connects."""
        return self.credentials.identity

    @identity.setter
    def identity(self, identity: Identity) -> None:
        self.credentials.check_name(identity)
        self.credentials.identity = identity

    async def traffic(self) -> Counter[tuple[str, str]]:
        """The bytes of all its sessions, including ended ones; see `Session.traffic`. On the I/O loop."""
        total = self._connector.ended_traffic + self._server.ended_traffic
        for session in (*self.sessions, *(link.session for link in self.links)):
            total.update(session.traffic())
        return total

    # ------------------------------------------------------------ any thread

    def serve(self, host: str, port: int, timeout_s: float = SLOW_ANSWER_LIMIT_S, is_apart: bool = False) -> str:
        """Starts the server of this process, if it does not run yet; blocks.

        A later caller that needs its own port (a store at MASTER_PORT in a process that is already an RPC worker) gets
        a second listener. All listeners have the same services, except those added for one address.

        Args:
            port: 0 takes the address that is already served, or picks a free port.
            is_apart: whether 0 must pick a free port.

        Returns:
            host:port as bound. `stop_serving` releases it.

        Raises:
            TransportError: the port is in use.
        """
        with self._serving_lock:
            at_port = (address for address in self._addresses if split_address(address)[1] == port)
            address = self.address if port == 0 and not is_apart else next(at_port, None)
            if address is None:
                address = self.run(self._server.start_serving(host, port), timeout_s)
                fork.note_server_port(split_address(address)[1])
            self._addresses[address] = self._addresses.get(address, 0) + 1
            return address

    def stop_serving(self, address: str) -> None:
        """Releases an address that `serve` returned; the last release ends the listener. Blocks, bounded."""
        with self._serving_lock:
            if address not in self._addresses:
                return
            self._addresses[address] -= 1
            if self._addresses[address]:
                return
            del self._addresses[address]
        self.io.finish(self._server.stop_address(address, GRPC_STOP_GRACE_S), CLOSE_LIMIT_S)

    def add_service(
        self,
        descriptor: ServiceDescriptor,
        methods: Mapping[str, Method],
        timeout_s: float = SLOW_ANSWER_LIMIT_S,
        address: str | None = None,
    ) -> None:
        """Serves methods of a service; see `Server.add_service`. Handlers are coroutines on the I/O loop."""
        self.run(self._server.add_service(descriptor, methods, address), timeout_s)

    def take_sockets(self, name: str, taker: SocketTaker, host: str, timeout_s: float) -> HubAddress:
        """Lets peers open raw sockets to `taker`, and starts the listeners if necessary; blocks.

        Args:
            name: the name of the taker within this process.
            taker: gets the sockets whose handshake is done.
            host: the address of the TCP listener; its port is one of `ports`.

        Returns:
            The addresses of the listeners.

        Raises:
            TransportError: the address cannot be bound.
        """
        self._roles.take_sockets(name, taker)
        return HubAddress(*self.run(self._server.listen_for_sockets(host), timeout_s), taker=name)

    def end_sockets(self, name: str) -> None:
        """Ends `take_sockets`: later peers are refused."""
        self._roles.take_sockets(name, None)

    # ------------------------------------------------------------ life

    def start_loop(self) -> Node:
        """Starts the I/O loop. The caller then has a share of the node; `release` returns it."""
        self._num_shares = 1
        self.io.start_thread()
        fork.mark_running()
        register_at_exit(self._stop)
        return self

    def share(self) -> bool:
        """Takes another share, unless the node has ended; any thread."""
        with self._shares_lock:
            if self._num_shares:
                self._num_shares += 1
            return self._num_shares > 0

    def release(self) -> None:
        """Returns a share; the last return stops the server and the loop. Blocks, bounded."""
        with self._shares_lock:
            self._num_shares -= 1
            if self._num_shares != 0:
                return
        unregister_at_exit(self._stop)
        fork.mark_stopped()
        self._stop()

    def _stop(self) -> None:
        if fork.in_forked_child():  # the loop's thread and the connections are the parent's
            return
        if self.io.is_closed:  # the process is exiting, and a finalizer returned its share after the exit handlers
            return
        try:
            self.io.finish(self._close_all(), CLOSE_LIMIT_S)
        except Exception:
            logger.warning("the transport did not stop cleanly", exc_info=True)
        self.io.close()

    async def _close_all(self) -> None:
        await self._server.drain_unary(LEAVE_LIMIT_S)
        for session in list(self.sessions):
            session.close("the peer shut down")
        await asyncio.gather(*(link.close() for link in list(self.links)))
        await self._server.stop(GRPC_STOP_GRACE_S)
        self._addresses.clear()


# ---------------------------------------------------------------- the node that store, collectives and RPC share


# Weak: an ended node still refers to the services of its users, and would keep them alive.
_shared: weakref.ref[Node] | None = None
_sharing = threading.Lock()


def acquire_node(options: NodeOptions | None = None) -> Node:
    """The node of this process, started if necessary; pair it with `Node.release`.

    Args:
        options: settings of a node that is started now. A running node keeps its own, so another token, job, TLS or
            range of ports is an error.

    Raises:
        ConfigError: the running node was started with another token, job, TLS or range of ports.
        ForkedProcess: this process was forked from one that runs a node.
    """
    global _shared
    fork.check_not_forked()
    with _sharing:
        node = None if _shared is None else _shared()
        if node is None or not node.share():
            with names_shortage("starting the node"):
                node = Node(options or NodeOptions()).start_loop()
            _shared = weakref.ref(node)
        elif options is not None:
            with on_error(node.release):
                _check_same(node, options)
        return node


def _check_same(node: Node, options: NodeOptions) -> None:
    mine = node.credentials
    if options.token is not None and job_token(options.token) != mine.token:
        raise ConfigError("this process already uses another job token. Use one token per process.")
    if TlsPolicy.of_environment(options.tls) != mine.tls_policy:
        raise ConfigError(
            f"this process already uses TLS {mine.tls_policy.mode!r} with "
            f"{mine.tls_policy.files or 'certificates made from the job token'}. Set TLS and its files with "
            f"{TLS_VARIABLE}, which applies to stores, groups and RPC."
        )
    if PortRange.of_environment(options.ports) != node.ports:
        raise ConfigError(
            f"this process already listens on ports {node.ports}. Set them with {PORTS_VARIABLE}, which applies to "
            "stores, groups and RPC."
        )
    if options.job != mine.job:
        raise ConfigError(
            f"this process already belongs to job {mine.job!r}, so it cannot join job {options.job!r}. Set the name of "
            "the job with RPCDIST_JOB, which applies to stores, groups and RPC."
        )
