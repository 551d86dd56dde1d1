"""Which ranks of a group share a host: found out by trying, never by comparing hostnames.

Every rank publishes the address of its socket hub. Ranks r and j < r share a host if r can open j's Unix socket, whose
name is abstract and random, so that it exists in one network namespace of one kernel only; and then only if j's memory
arrives at r. The lowest rank of a host leads it, and makes the memory. Every rank says in the store how it went; a
host on which it did not work for everybody uses sockets.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import select
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import await_keys
from rpcdist.collectives._transports.hierarchical import Hosts
from rpcdist.deadline import Deadline
from rpcdist.errors import DistNetworkError, RendezvousError, RpcdistError, StoreTimeout, TransportError
from rpcdist.transport.shared_memory import Segment, accept, offer
from rpcdist.transport.sockets import HubAddress, SocketHub

__all__ = ["Bootstrap", "exchange", "find_hosts", "share_memory"]

logger = logging.getLogger(__name__)

PROBE_LIMIT_S: Final = 5.0
MEMORY_LIMIT_S: Final = 20.0
CHECK_INTERVAL_MS: Final = 50
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How the ranks of a group reach one another.

    Attributes:
        uid: of this group; random, the same on all ranks.
        addresses: of the ranks' hubs, by rank in the group.
        boots: which boot of a kernel each rank runs on; empty where that is unknown.
    """

    uid: str
    addresses: tuple[str, ...]
    boots: tuple[str, ...]


def exchange(context: GroupContext, key: str, value: str, deadline: Deadline) -> list[str]:
    """Publishes a value of this rank, and returns everybody's.

    Raises:
        RendezvousError: some ranks did not publish theirs in time; names them.
    """
    store = context.store
    keys = [f"{key}/{rank}" for rank in range(context.size)]
    store.set(keys[context.rank], value)
    try:
        await_keys(store, keys, deadline.remaining_s(), context.check)
    except StoreTimeout as exc:
        missing = [context.ranks[rank] for rank, name in enumerate(keys) if not store.check([name])]
        raise RendezvousError(
            f"group {context.name!r} could not be made: these ranks did not come within {context.timeout_s:g} s: "
            f"{', '.join(map(str, missing))}. Do they run, and do all ranks call the same functions in the same order?"
        ) from exc
    return [value.decode() for value in store.multi_get(keys)]


def meet(context: GroupContext, hub: SocketHub, deadline: Deadline, unix_sockets: bool = True) -> Bootstrap:
    """Publishes where this rank is, without its Unix socket if others shall not use that, and learns where all are."""
    address = HubAddress.parse(hub.address)
    if not unix_sockets:
        address = dataclasses.replace(address, unix_name="")
    mine = {"hub": str(address), "boot": _boot_id(), "uid": secrets.token_hex(8)}
    entries = [json.loads(text) for text in exchange(context, "bootstrap", json.dumps(mine), deadline)]
    return Bootstrap(
        uid=str(entries[0]["uid"]),
        addresses=tuple(str(entry["hub"]) for entry in entries),
        boots=tuple(str(entry["boot"]) for entry in entries),
    )


def find_hosts(context: GroupContext, hub: SocketHub, bootstrap: Bootstrap, allowed: bool, deadline: Deadline) -> Hosts:
    """Finds out who shares a host. With `allowed` false on a rank, that rank stays alone."""
    prefix = f"{bootstrap.uid}/probe/"
    hub.announce(prefix, _close_probe)
    try:
        leader = _lowest_reachable(context.rank, hub, bootstrap) if allowed else context.rank
        texts = exchange(context, "host", json.dumps([leader, allowed]), deadline)
    finally:
        hub.withdraw(prefix)
    found = [json.loads(text) for text in texts]
    # A rank that keeps to itself can be reached by others all the same: they must not follow it.
    leaders = [leader if found[leader][1] else rank for rank, (leader, _) in enumerate(found)]
    return Hosts.from_leaders(leaders)


def _lowest_reachable(rank: int, hub: SocketHub, bootstrap: Bootstrap) -> int:
    for other in range(rank):
        if bootstrap.boots[other] != bootstrap.boots[rank]:
            continue
        try:
            hub.connect(bootstrap.addresses[other], f"{bootstrap.uid}/probe/{rank}", PROBE_LIMIT_S, unix=True).close()
            return other
        except TransportError as exc:
            logger.debug("rank %s is not on this host: %s", other, exc)
    return rank


def _close_probe(purpose: str, sock: socket.socket) -> None:
    sock.close()


def share_memory(
    context: GroupContext, hub: SocketHub, bootstrap: Bootstrap, hosts: Hosts, size_bytes: int, deadline: Deadline
) -> tuple[Segment | None, Hosts]:
    """Gives every host with several ranks its memory.

    Returns:
        This host's segment, or None; and the hosts that work, ranks of the others standing alone.
    """
    segment: Segment | None = None
    reason = ""
    members = hosts.members[hosts.index_of(context.rank)]
    limit = deadline.earlier(Deadline.after(MEMORY_LIMIT_S))
    try:
        if len(members) > 1:
            segment = _share_on_host(context, members, hub, bootstrap, size_bytes, limit)
    except (RpcdistError, OSError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
    outcomes = exchange(context, "memory", reason, deadline)
    works = [all(not outcomes[rank] for rank in ranks) for ranks in hosts.members]
    mine = hosts.index_of(context.rank)
    if not works[mine]:
        failed = "; ".join(f"rank {context.ranks[rank]}: {outcomes[rank]}" for rank in members if outcomes[rank])
        logger.warning("group %r uses sockets on this host, since shared memory failed: %s", context.name, failed)
        if segment is not None:
            segment.close()
            segment = None
    leaders = {rank: ranks[0] if works[index] else rank for index, ranks in enumerate(hosts.members) for rank in ranks}
    return segment, Hosts.from_leaders([leaders[rank] for rank in range(context.size)])


def _share_on_host(
    context: GroupContext,
    members: tuple[int, ...],
    hub: SocketHub,
    bootstrap: Bootstrap,
    size_bytes: int,
    deadline: Deadline,
) -> Segment:
    rank, purpose = context.rank, f"{bootstrap.uid}/memory/"
    if rank != members[0]:
        with hub.connect(
            bootstrap.addresses[members[0]], f"{purpose}{rank}", deadline.remaining_s(), unix=True
        ) as connection:
            _await_offer(context, connection, deadline)
            return accept(connection, deadline.remaining_s())
    segment = Segment.create(size_bytes)
    try:
        for member in members[1:]:
            with hub.expect(f"{purpose}{member}", deadline.remaining_s(), context.check) as connection:
                offer(connection, segment)
    except BaseException:
        segment.close()
        raise
    return segment


def _await_offer(context: GroupContext, connection: socket.socket, deadline: Deadline) -> None:
    """Until something can be read, or the time is over; the leader may have given up over another rank."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not poller.poll(CHECK_INTERVAL_MS) and not deadline.expired():
        if context.check is not None:
            context.check()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def watch_sockets(
    context: GroupContext, hub: SocketHub, bootstrap: Bootstrap, deadline: Deadline
) -> dict[int, socket.socket]:
    """The connections of the group's watch: at rank 0 one with every other rank, elsewhere one with rank 0."""
    purpose = f"{bootstrap.uid}/watch/"
    if context.rank != 0:
        return {0: hub.connect(bootstrap.addresses[0], f"{purpose}{context.rank}", deadline.remaining_s())}
    found: dict[int, socket.socket] = {}
    try:
        for rank in range(1, context.size):
            found[rank] = hub.expect(f"{purpose}{rank}", deadline.remaining_s(), context.check)
    except BaseException as exc:
        for sock in found.values():
            sock.close()
        if isinstance(exc, TimeoutError):
            missing = [context.ranks[rank] for rank in range(1, context.size) if rank not in found]
            raise DistNetworkError(f"ranks {missing} of group {context.name!r} did not connect to rank 0") from exc
        raise
    return found
