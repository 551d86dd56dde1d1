"""The `tcp` backend: groups of CPU tensors over shared memory within a host and TCP between hosts."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import ClassVar

from rpcdist.collectives._group.at_exit import close_at_exit
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import Bootstrap, connect_watch, exchange_addresses
from rpcdist.collectives._group.engine_backend import EngineBackend, GroupEngine, Messages
from rpcdist.collectives._group.local_process import LocalProcess, acquire_local_process, bind_host
from rpcdist.collectives._group.setup_watch import SetupWatch
from rpcdist.collectives._group.shared_hosts import find_hosts, share_memory
from rpcdist.collectives._group.watch import Watch
from rpcdist.collectives._transports.base import Transport
from rpcdist.collectives._transports.hierarchical import HierarchicalTransport, Hosts
from rpcdist.collectives._transports.p2p.mailboxes import Mailboxes
from rpcdist.collectives._transports.shm import ShmTransport, segment_size, unsupported_here
from rpcdist.collectives._transports.single import SingleRankTransport
from rpcdist.collectives._transports.sockets.socket_transport import SocketTransport
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError
from rpcdist.time_limits import THREAD_GRACE_S
from rpcdist.transport.sockets import SocketHub

__all__ = ["TcpBackend", "TcpOptions"]

logger = logging.getLogger(__name__)

SHARED_MEMORY_VARIABLE = "RPCDIST_SHARED_MEMORY"


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """`pg_options` of the `tcp` backend.

    Attributes:
        shared_memory: whether ranks of one host may use shared memory; the default is what `RPCDIST_SHARED_MEMORY` says
            (0 or 1), and 1 without it. A rank that says no takes part through sockets.
        unix_sockets: whether ranks of one host may reach this one through Unix sockets; without them only TCP is left.
    """

    shared_memory: bool | None = None
    unix_sockets: bool = True

    def allows_shared_memory(self) -> bool:
        if not self.unix_sockets:
            return False  # the memory is handed over through them
        if self.shared_memory is not None:
            return self.shared_memory
        text = os.environ.get(SHARED_MEMORY_VARIABLE, "1")
        if text not in ("0", "1"):
            raise ConfigError(f"{SHARED_MEMORY_VARIABLE} is 0 or 1, not {text!r}")
        return text == "1"


class TcpBackend(EngineBackend):
    """See `GroupBackend`; made on every rank of the group at about the same time.

    Raises (constructor):
        RendezvousError: some ranks did not come; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        options = context.options if isinstance(context.options, TcpOptions) else TcpOptions()
        self._process: LocalProcess | None = None
        self._watch: Watch | None = None
        self._transport: Transport
        if context.size == 1:
            self._transport = SingleRankTransport()
            self._mailboxes = Mailboxes(context.name, 0, context.ranks)
            self._engine = self._new_engine()
        else:
            self._process = acquire_local_process(bind_host(context.store))
            try:
                self._open(self._process, options, self._deadline)
            except BaseException:
                self._process.release()
                raise
        close_at_exit(self)

    def _open(self, process: LocalProcess, options: TcpOptions, deadline: Deadline) -> None:
        context, hub = self.context, process.hub
        bootstrap = exchange_addresses(context, hub, deadline, options.unix_sockets)
        setup = SetupWatch(context)
        self._watch = Watch(process.node, context.rank, context.ranks, context.name, setup)
        try:
            sockets = connect_watch(context, hub, bootstrap, deadline)
            self._watch.start(sockets, deadline.remaining_s() + THREAD_GRACE_S)
            checked = dataclasses.replace(context, check=setup.check)
            self._transport = _make_transport(checked, hub, bootstrap, options, deadline)
        except BaseException:
            self._watch.close(0)
            raise
        self._mailboxes = Mailboxes(context.name, context.rank, context.ranks, hub, bootstrap.uid, bootstrap.addresses)
        self._engine = self._new_engine()
        self._engine.reporter = self._watch
        setup.end(self._engine)

    def _new_engine(self) -> GroupEngine:
        engine = GroupEngine(self._transport, self.context.name, self.context.ranks, self.context.timeout_s)
        engine.on_failure = self._mailboxes.fail
        engine.on_departure = self._mailboxes.peer_lost
        return engine

    def __repr__(self) -> str:
        medium = type(self._transport).__name__.removesuffix("Transport")
        return f"<TcpBackend rank {self.context.rank} of {self.context.size}, {medium}, {self._engine!r}>"

    @property
    def _messages(self) -> Messages:
        return self._mailboxes

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after(timeout_s)
        self._engine.close(timeout_s)
        self._mailboxes.drain(deadline.remaining_s())
        self._free()
        if self._process is not None:
            self._process.release()

    def _free(self) -> None:
        self._mailboxes.close()
        if self._watch is not None:
            self._watch.close(self._engine.sequence)
        self._transport.close()
        self._engine.free()


def _make_transport(
    context: GroupContext, hub: SocketHub, bootstrap: Bootstrap, options: TcpOptions, deadline: Deadline
) -> Transport:
    """The fastest transport that the ranks share."""
    refused = unsupported_here()
    allowed = options.allows_shared_memory()
    if refused is not None and allowed:
        logger.warning("collectives use TCP within this host: %s", refused)
    hosts = find_hosts(context, hub, bootstrap, allowed and refused is None, deadline)
    largest = max(map(len, hosts.members))
    size_bytes = segment_size(len(hosts.members[hosts.index_of(context.rank)])) if largest > 1 else 0
    segment = None
    if largest > 1:
        segment, hosts = share_memory(context, hub, bootstrap, hosts, size_bytes, deadline)
    addresses = list(bootstrap.addresses)
    if len(hosts.members) == context.size:
        return SocketTransport(context.rank, context.size, hub, f"{bootstrap.uid}/all", addresses)
    mine = hosts.members[hosts.index_of(context.rank)]
    local: Transport
    if segment is None:
        local = SingleRankTransport()
    else:
        local = ShmTransport(mine.index(context.rank), len(mine), segment)
    if len(hosts.members) == 1:
        return local
    return _make_hybrid(context, hub, bootstrap, hosts, local)


def _make_hybrid(
    context: GroupContext, hub: SocketHub, bootstrap: Bootstrap, hosts: Hosts, local: Transport
) -> Transport:
    leaders = hosts.leaders
    between = None
    if context.rank in leaders:
        addresses = [bootstrap.addresses[rank] for rank in leaders]
        between = SocketTransport(leaders.index(context.rank), len(leaders), hub, f"{bootstrap.uid}/leaders", addresses)
    everyone = SocketTransport(context.rank, context.size, hub, f"{bootstrap.uid}/all", list(bootstrap.addresses))
    return HierarchicalTransport(context.rank, hosts, local, between, everyone)
