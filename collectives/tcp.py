"""The `tcp` backend: groups of CPU tensors over shared memory within a host and TCP between hosts.

Ranks find out by trying, never by comparing names, whether they share a host and memory. Every rank publishes the
address of its socket hub. Ranks r and j < r share a host if r can open j's Unix socket, whose name is abstract and
random, so that it exists in only one network namespace of one kernel; and if j can pass its memory to r. The lowest
rank of a host leads it, and makes the memory; rank 0 passes it over the connections of the watch. If all ranks share
the host of rank 0, the memory comes with their addresses. Otherwise, every rank reports whether it worked; if it failed
for one rank of a host, that host uses sockets.
"""

from __future__ import annotations

import json
import logging
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.engine_backend import EngineBackend
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._group.state import GroupFailure
from rpcdist.collectives._transports.hierarchical import (
    HierarchicalTransport,
    Hosts,
    hosts_of,
    index_of_host,
    leaders_of,
)
from rpcdist.collectives._transports.p2p.messenger import open_messenger
from rpcdist.collectives._transports.shm.futex import unsupported_here
from rpcdist.collectives._transports.shm.routes import segment_size
from rpcdist.collectives._transports.shm.shm_transport import ShmTransport
from rpcdist.collectives._transports.sockets.pair_connections import PairConnections
from rpcdist.collectives._transports.sockets.socket_transport import SocketTransport
from rpcdist.collectives._transports.transport_base import SingleRankTransport, Transport
from rpcdist.deadline import Deadline
from rpcdist.errors import ProtocolViolation, RpcdistError, TransportError
from rpcdist.own_shortage import own_shortage, try_for_descriptor
from rpcdist.time_limits import ATTEMPT_LIMIT_S, CHECK_INTERVAL_S, SLOW_ANSWER_LIMIT_S
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.shared_memory import Segment, SegmentError, accept, offer

logger = logging.getLogger(__name__)


def find_hosts(rank: int, watch: GroupWatch, allowed: bool, deadline: Deadline) -> Hosts:
    """Groups the ranks by host, if not all are beside rank 0. A rank that passes `allowed` as False stays alone."""
    prefix = f"{watch.uid}/probe/"
    watch.hub.announce(prefix, lambda _, sock: sock.close())
    try:
        leader = rank
        if allowed:
            leader = 0 if watch.beside_rank_0[rank] else _lowest_reachable(rank, watch)
        entries = watch.read(watch.exchange(json.dumps([leader, allowed]), deadline), _read_leader)
    finally:
        watch.hub.withdraw(prefix)
    # Others can reach a rank that is not allowed to share memory, but must not take it as their leader.
    leaders = [leader if entries[leader][1] else rank for rank, (leader, _) in enumerate(entries)]
    return hosts_of(leaders)


def _read_leader(rank: int, text: str) -> tuple[int, bool]:
    """The lowest rank of its host that a rank has found, and whether it may share memory. Raises `ValueError`."""
    values = json.loads(text)
    if not isinstance(values, list) or list(map(type, values)) != [int, bool] or not 0 <= values[0] <= rank:
        raise ValueError("not a rank that may be the leader, and a flag")
    return values[0], values[1]


def _lowest_reachable(rank: int, watch: GroupWatch) -> int:
    for other in range(rank):
        if watch.boots[other] != watch.boots[rank]:
            continue
        try:
            watch.hub.connect(watch.addresses[other], f"{watch.uid}/probe/{rank}", ATTEMPT_LIMIT_S, unix=True).close()
            return other
        except TransportError as exc:
            logger.debug("rank %s is not on this host: %s", other, exc)
    return rank


def share_memory(
    context: GroupContext, watch: GroupWatch, hosts: Hosts, size_bytes: int, deadline: Deadline
) -> tuple[Segment | None, Hosts]:
    """Makes the shared memory of every host with several ranks.

    Returns:
        This host's segment, or None; and the hosts, of which those without shared memory are split into single ranks.
    """
    segment: Segment | None = None
    reason = ""
    members = hosts[index_of_host(hosts, context.rank)]
    limit = deadline.earlier(Deadline.after(SLOW_ANSWER_LIMIT_S))
    try:
        if len(members) > 1:
            segment = _share_on_host(context, members, watch, size_bytes, limit)
    except (RpcdistError, OSError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
    outcomes = watch.exchange(reason, deadline)
    if any(outcomes[rank] for rank in members):
        failed = "; ".join(f"rank {context.ranks[rank]}: {outcomes[rank]}" for rank in members if outcomes[rank])
        logger.warning("group %r uses sockets on this host, because shared memory failed: %s", context.name, failed)
        segment = None
    leaders = list(range(context.size))
    for ranks in hosts:
        if not any(outcomes[rank] for rank in ranks):
            for rank in ranks:
                leaders[rank] = ranks[0]
    return segment, hosts_of(leaders)


def _share_on_host(
    context: GroupContext, members: tuple[int, ...], watch: GroupWatch, size_bytes: int, deadline: Deadline
) -> Segment:
    rank, purpose = context.rank, f"{watch.uid}/memory/"
    leader = members[0]
    direct = [member for member in members[1:] if leader == 0 and watch.beside_rank_0[member]]
    if rank in direct:
        given = watch.memory_of_rank_0(deadline)
        if given is None:
            raise SegmentError("rank 0 could not make it")
        return given
    if rank != leader:
        address = watch.addresses[leader]
        with watch.hub.connect(address, f"{purpose}{rank}", deadline.remaining_s(), unix=True) as connection:
            assert isinstance(connection, socket.socket)  # a Unix socket has no TLS
            _await_offer(watch, connection, deadline)
            return accept(connection, deadline.remaining_s())
    segment: Segment | None = None
    try:
        segment = Segment.create(size_bytes)
    finally:
        watch.reporter.pass_memory(segment, direct)  # later, so no error may close it here: its last owner does
    others = [str(member) for member in members[1:] if member not in direct]
    found: dict[str, StreamSocket] = {}
    try:
        watch.hub.collect(purpose, others, found, deadline.remaining_s(), watch.check)
        for member, connection in found.items():
            if not isinstance(connection, socket.socket):
                raise ProtocolViolation(f"rank {context.ranks[int(member)]} asked for shared memory from another host")
            offer(connection, segment)
    finally:
        for connection in found.values():
            connection.close()
    return segment


def _await_offer(watch: GroupWatch, connection: socket.socket, deadline: Deadline) -> None:
    """Waits until the connection is readable, up to the deadline; the leader may give up because of another rank."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not poller.poll(1000 * CHECK_INTERVAL_S) and not deadline.expired():
        watch.check()


__all__ = ["TcpBackend", "TcpOptions"]


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """`pg_options` of the `tcp` backend.

    Attributes:
        shared_memory: whether ranks of one host may use shared memory. A rank with False takes part through sockets.
        unix_sockets: whether ranks of one host may reach this one through Unix sockets; otherwise they use TCP.
    """

    shared_memory: bool = True
    unix_sockets: bool = True


class TcpBackend(EngineBackend):
    """See `GroupBackend`; made on every rank of the group at about the same time.

    Raises (constructor):
        RendezvousError: some ranks did not join; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, context: GroupContext) -> None:
        options = context.options if isinstance(context.options, TcpOptions) else TcpOptions()
        deadline = Deadline.after(context.timeout_s)
        watch: GroupWatch | None = None
        shares = context.size > 1 and _shares_memory(options)
        if context.size > 1:
            watch = GroupWatch(context, deadline, options.unix_sockets, segment_size(context.size) if shares else 0)
        with ExitStack() as undo:
            transport: Transport = SingleRankTransport()
            if watch is not None:
                undo.callback(watch.give_up)
                transport = _make_transport(context, watch, shares, deadline)
                undo.callback(transport.close)
            hub, uid, addresses = (None, "", ()) if watch is None else (watch.hub, watch.uid, watch.addresses)
            self._messenger = open_messenger(context.name, context.rank, context.ranks, hub, uid, addresses)
            undo.callback(self._messenger.close)
            super().__init__(context, watch, transport, self._messenger)
            undo.pop_all()

    def _fail_messages(self, failure: GroupFailure) -> None:
        self._messenger.fail(failure.error(f"send or recv in group {self.context.name!r}"))

    def _close_messages(self, deadline: Deadline, drained: bool) -> None:
        if left := self._messenger.drain(deadline.remaining_s()):
            logger.warning(
                "group %r was closed before %d sends had left this process; they are lost. The first is %s. Wait for "
                "the Work of each isend, or destroy the group before the program ends, so that sends have more time",
                self.context.name, len(left), left[0].title,
            )  # fmt: skip
        self._messenger.close()


def _shares_memory(options: TcpOptions) -> bool:
    refused = unsupported_here()
    if refused is None:
        try:
            try_for_descriptor()  # which the memory needs; later, the group could not be made
        except OSError as exc:
            refused = own_shortage(exc) or str(exc)
    allowed = options.shared_memory and options.unix_sockets  # through which ranks pass the memory
    if refused is not None and allowed:
        logger.warning("collectives use TCP within this host: %s", refused)
    return allowed and refused is None


def _make_transport(context: GroupContext, watch: GroupWatch, shares_memory: bool, deadline: Deadline) -> Transport:
    if all(watch.beside_rank_0):  # they got the memory with the addresses
        given = watch.memory_of_rank_0(deadline)
        if given is None:
            return _over_sockets(context.rank, range(context.size), watch, "all")
        return ShmTransport(context.rank, context.size, given)
    hosts = find_hosts(context.rank, watch, shares_memory, deadline)
    largest = max(map(len, hosts))
    size_bytes = segment_size(len(hosts[index_of_host(hosts, context.rank)])) if largest > 1 else 0
    segment = None
    if largest > 1:
        segment, hosts = share_memory(context, watch, hosts, size_bytes, deadline)
    if len(hosts) == context.size:
        return _over_sockets(context.rank, range(context.size), watch, "all")
    on_host = hosts[index_of_host(hosts, context.rank)]
    local: Transport
    if segment is None:
        local = SingleRankTransport()
    else:
        local = ShmTransport(on_host.index(context.rank), len(on_host), segment)
    if len(hosts) == 1:
        return local
    return _make_hierarchical(context, watch, hosts, local)


def _make_hierarchical(context: GroupContext, watch: GroupWatch, hosts: Hosts, local: Transport) -> Transport:
    leaders = leaders_of(hosts)
    between = _over_sockets(context.rank, leaders, watch, "leaders") if context.rank in leaders else None
    everyone = _over_sockets(context.rank, range(context.size), watch, "all")
    return HierarchicalTransport(context.rank, hosts, local, between, everyone)


def _over_sockets(rank: int, ranks: Sequence[int], watch: GroupWatch, name: str) -> SocketTransport:
    """Returns the transport between some ranks of the group; `rank` is this process's rank in the group."""
    addresses = [watch.addresses[each] for each in ranks]
    return SocketTransport(PairConnections(ranks.index(rank), watch.hub, f"{watch.uid}/{name}", addresses))
