"""Which ranks of a group share a host, and the memory that they share: found out by trying, never by comparing names.

Every rank publishes the address of its socket hub. Ranks r and j < r share a host if r can open j's Unix socket, whose
name is abstract and random, so that it exists in one network namespace of one kernel only; and then only if j's memory
arrives at r. The lowest rank of a host leads it, and makes the memory. Every rank says in the store if it worked; a
host on which it did not work for all its ranks uses sockets.
"""

from __future__ import annotations

import json
import logging
import select
import socket

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._transports.hierarchical import Hosts
from rpcdist.deadline import Deadline
from rpcdist.errors import ProtocolViolation, RpcdistError, TransportError
from rpcdist.time_limits import ATTEMPT_LIMIT_S, CHECK_INTERVAL_S, SLOW_ANSWER_LIMIT_S
from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.shared_memory import Segment, accept, offer

logger = logging.getLogger(__name__)


def find_hosts(rank: int, watch: GroupWatch, allowed: bool, deadline: Deadline) -> Hosts:
    """Groups the ranks by host. A rank that passes `allowed` as False stays alone; rank 0 need not be tried again."""
    prefix = f"{watch.uid}/probe/"
    watch.hub.announce(prefix, _close_probe)
    try:
        leader = rank
        if allowed:
            is_with_rank_0 = watch.reached_rank_0 and watch.boots[0] == watch.boots[rank]
            leader = 0 if is_with_rank_0 else _lowest_reachable(rank, watch)
        texts = watch.exchange(json.dumps([leader, allowed]), deadline)
    finally:
        watch.hub.withdraw(prefix)
    entries = [json.loads(text) for text in texts]
    # A rank that is not allowed to share can be reached by others all the same: they must not follow it.
    leaders = [leader if entries[leader][1] else rank for rank, (leader, _) in enumerate(entries)]
    return Hosts.from_leaders(leaders)


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


def _close_probe(purpose: str, sock: StreamSocket) -> None:
    sock.close()


def share_memory(
    context: GroupContext, watch: GroupWatch, hosts: Hosts, size_bytes: int, deadline: Deadline
) -> tuple[Segment | None, Hosts]:
    """Gives every host with several ranks its memory.

    Returns:
        This host's segment, or None; and the hosts that work, ranks of the others standing alone.
    """
    segment: Segment | None = None
    reason = ""
    members = hosts.members[hosts.index_of(context.rank)]
    limit = deadline.earlier(Deadline.after(SLOW_ANSWER_LIMIT_S))
    try:
        if len(members) > 1:
            segment = _share_on_host(context, members, watch, size_bytes, limit)
    except (RpcdistError, OSError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
    outcomes = watch.exchange(reason, deadline)
    works = [all(not outcomes[rank] for rank in ranks) for ranks in hosts.members]
    if not works[hosts.index_of(context.rank)]:
        failed = "; ".join(f"rank {context.ranks[rank]}: {outcomes[rank]}" for rank in members if outcomes[rank])
        logger.warning("group %r uses sockets on this host, since shared memory failed: %s", context.name, failed)
        if segment is not None:
            segment.close()
            segment = None
    leaders = {rank: ranks[0] if works[index] else rank for index, ranks in enumerate(hosts.members) for rank in ranks}
    return segment, Hosts.from_leaders([leaders[rank] for rank in range(context.size)])


def _share_on_host(
    context: GroupContext, members: tuple[int, ...], watch: GroupWatch, size_bytes: int, deadline: Deadline
) -> Segment:
    rank, purpose = context.rank, f"{watch.uid}/memory/"
    if rank != members[0]:
        address = watch.addresses[members[0]]
        with watch.hub.connect(address, f"{purpose}{rank}", deadline.remaining_s(), unix=True) as connection:
            _await_offer(watch, connection, deadline)
            return accept(connection, deadline.remaining_s())
    segment = Segment.create(size_bytes)
    try:
        for member in members[1:]:
            with watch.hub.expect(f"{purpose}{member}", deadline.remaining_s(), watch.check) as connection:
                if not isinstance(connection, socket.socket):
                    raise ProtocolViolation(f"rank {context.ranks[member]} asked for shared memory from another host")
                offer(connection, segment)
    except BaseException:
        segment.close()
        raise
    return segment


def _await_offer(watch: GroupWatch, connection: socket.socket, deadline: Deadline) -> None:
    """Waits until something can be read, or the time is over; the leader may have given up because of another rank."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not poller.poll(1000 * CHECK_INTERVAL_S) and not deadline.expired():
        watch.check()
