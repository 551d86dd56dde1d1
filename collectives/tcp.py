"""The `tcp` backend: groups of CPU tensors over shared memory within a host and TCP between hosts."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.engine import Engine
from rpcdist.collectives._group.engine_backend import EngineBackend
from rpcdist.collectives._group.group_failure import GroupFailure, Reporter
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._group.shared_hosts import find_hosts, share_memory
from rpcdist.collectives._group.state import GroupState
from rpcdist.collectives._transports.hierarchical import HierarchicalTransport, Hosts
from rpcdist.collectives._transports.p2p.messenger import Mailboxes
from rpcdist.collectives._transports.shm.futex import unsupported_here
from rpcdist.collectives._transports.shm.routes import segment_size
from rpcdist.collectives._transports.shm.shm_transport import ShmTransport
from rpcdist.collectives._transports.sockets.socket_transport import SocketTransport
from rpcdist.collectives._transports.transport_base import SingleRankTransport, Transport
from rpcdist.deadline import Deadline

__all__ = ["TcpBackend", "TcpOptions"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """`pg_options` of the `tcp` backend.

    Attributes:
        shared_memory: whether ranks of one host may use shared memory. A rank that says no takes part through sockets.
        unix_sockets: whether ranks of one host may reach this one through Unix sockets; without them only TCP is left.
    """

    shared_memory: bool = True
    unix_sockets: bool = True

    def allows_shared_memory(self) -> bool:
        return self.shared_memory and self.unix_sockets  # the memory is handed over through the sockets


class TcpBackend(EngineBackend):
    """See `GroupBackend`; made on every rank of the group at about the same time.

    Raises (constructor):
        RendezvousError: some ranks did not come; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, context: GroupContext) -> None:
        options = context.options if isinstance(context.options, TcpOptions) else TcpOptions()
        state = GroupState(context.name, context.rank, context.ranks)
        deadline = Deadline.after(context.timeout_s)
        self._watch = GroupWatch(context, state, deadline, options.unix_sockets) if context.size > 1 else None
        with ExitStack() as undo:
            self._transport = _connect(context, self._watch, options, deadline, undo)
            self.reduces_many = self._transport.reduces_many
            self._mailboxes = _make_mailboxes(context, self._watch)
            undo.callback(self._mailboxes.close)
            engine = Engine(
                self._transport,
                state,
                timeout_s=context.timeout_s,
                recorder=context.process.recorder,
                outlives_ranks=context.outlives_ranks,
                reporter=Reporter() if self._watch is None else self._watch.reporter,
                on_failure=self._fail_messages,
                on_departure=self._mailboxes.peer_lost,
            )
            undo.pop_all()
        super().__init__(context, engine, self._mailboxes)
        if self._watch is None:
            engine.opened()
        else:
            self._watch.hand_over(engine)

    def _fail_messages(self, failure: GroupFailure) -> None:
        self._mailboxes.fail(failure.error(f"send or recv in group {self.context.name!r}"))
        self._fail_nested(failure)

    def __repr__(self) -> str:
        medium = type(self._transport).__name__.removesuffix("Transport")
        return f"<TcpBackend rank {self.context.rank} of {self.context.size}, {medium}, {self._engine!r}>"

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after(timeout_s)
        self._engine.close(timeout_s)
        self._end_callbacks(deadline)
        if left := self._mailboxes.drain(deadline.remaining_s()):
            logger.warning(
                "group %r was closed before %d sends had left this process, which are lost. The first is %s. Wait for "
                "the Work of each isend, or destroy the group before the program ends, which leaves it more time",
                self.context.name,
                len(left),
                left[0].title,
            )
        self._mailboxes.close()
        if self._watch is not None:
            self._watch.leave(self._engine.state.sequence)
        self._transport.close()
        self._engine.free()
        if self._watch is not None:
            self._watch.release()


def _make_mailboxes(context: GroupContext, watch: GroupWatch | None) -> Mailboxes:
    if watch is None:
        return Mailboxes(context.name, context.rank, context.ranks)
    return Mailboxes(context.name, context.rank, context.ranks, watch.hub, watch.uid, watch.addresses)


def _connect(
    context: GroupContext, watch: GroupWatch | None, options: TcpOptions, deadline: Deadline, undo: ExitStack
) -> Transport:
    """Connects this rank with the others; `undo` closes what was opened, and tells them that this one gives up."""
    if watch is None:
        return SingleRankTransport()
    undo.callback(watch.give_up)
    transport = _make_transport(context, watch, options, deadline)
    undo.callback(transport.close)
    return transport


def _make_transport(context: GroupContext, watch: GroupWatch, options: TcpOptions, deadline: Deadline) -> Transport:
    """The fastest transport that the ranks share."""
    refused = unsupported_here()
    allowed = options.allows_shared_memory()
    if refused is not None and allowed:
        logger.warning("collectives use TCP within this host: %s", refused)
    hosts = find_hosts(context.rank, watch, allowed and refused is None, deadline)
    largest = max(map(len, hosts.members))
    size_bytes = segment_size(len(hosts.members[hosts.index_of(context.rank)])) if largest > 1 else 0
    segment = None
    if largest > 1:
        segment, hosts = share_memory(context, watch, hosts, size_bytes, deadline)
    if len(hosts.members) == context.size:
        return SocketTransport(context.rank, context.size, watch.hub, f"{watch.uid}/all", list(watch.addresses))
    on_host = hosts.members[hosts.index_of(context.rank)]
    local: Transport
    if segment is None:
        local = SingleRankTransport()
    else:
        local = ShmTransport(on_host.index(context.rank), len(on_host), segment)
    if len(hosts.members) == 1:
        return local
    return _make_hierarchical(context, watch, hosts, local)


def _make_hierarchical(context: GroupContext, watch: GroupWatch, hosts: Hosts, local: Transport) -> Transport:
    leaders = hosts.leaders
    between = None
    if context.rank in leaders:
        addresses = [watch.addresses[rank] for rank in leaders]
        name = f"{watch.uid}/leaders"
        between = SocketTransport(leaders.index(context.rank), len(leaders), watch.hub, name, addresses)
    everyone = SocketTransport(context.rank, context.size, watch.hub, f"{watch.uid}/all", list(watch.addresses))
    return HierarchicalTransport(context.rank, hosts, local, between, everyone)
