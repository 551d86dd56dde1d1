"""Starts a worker: serves on one port, joins the list of members, and makes the agent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from rpcdist import _upper_layers
from rpcdist._counters import metrics_are_wanted
from rpcdist._launch.placement import launcher_variable
from rpcdist._proto.membership_pb2 import JoinReply
from rpcdist.collectives import Store
from rpcdist.collectives._stores.store_base import SignedRecords
from rpcdist.collectives.rendezvous import outside_store
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import ConfigError, ConnectFailed, DistStoreError, RendezvousError, RpcdistError, StoreTimeout
from rpcdist.freed_memory import keep_freed_memory
from rpcdist.giving_up import pause
from rpcdist.ids import Identity, check_worker_name, new_incarnation
from rpcdist.own_shortage import check_descriptors_for
from rpcdist.rpc._agent import ROLE, Agent
from rpcdist.rpc._current import agent_or_none, context_of
from rpcdist.rpc._inspection.inspector import Inspector
from rpcdist.rpc._membership.coordinator import Coordinator, serve_membership
from rpcdist.rpc._membership.leaving import Leaving
from rpcdist.rpc._membership.roster_messages import members_of
from rpcdist.rpc._peers.device_maps import check_own_devices
from rpcdist.rpc._peers.directory import COORDINATOR, Member
from rpcdist.rpc._peers.network import Network
from rpcdist.rpc.options import RpcOptions
from rpcdist.rpc.rref import RRef
from rpcdist.time_limits import (
    ANSWER_LIMIT_S,
    ATTEMPT_LIMIT_S,
    FIRST_PAUSE_S,
    INIT_NOTICE_S,
    LONGEST_PAUSE_S,
    QUICK_ANSWER_LIMIT_S,
)
from rpcdist.transport import NodeOptions, acquire_node
from rpcdist.transport.addresses import host_from_environment, pick_bind_host, split_address

logger = logging.getLogger(__name__)

COORDINATOR_KEY = "rpc_coordinator"
"""The key of the coordinator's record: its address, followed by a space and its rank if that is not 0."""
LEFT: Final = "left"
"""That record after the coordinator of an elastic world has left as the last worker. The next worker that joins becomes
the coordinator, whatever its rank; until its address is known, it appends its rank to the word."""

_BUILDS: Final = threading.Lock()
"""Held while an agent is built. If a thousand agents start in one process, concurrent builds would contend for the
interpreter lock, which costs more than the builds themselves."""


def node_options(options: RpcOptions) -> NodeOptions:
    """The transport settings that follow from the RPC options."""
    token = options.token.decode() if isinstance(options.token, bytes) else options.token
    settings = NodeOptions(token=token, peer_timeout_s=options.peer_timeout, tls=options.tls, ports=options.ports)
    return settings if options.job is None else replace(settings, job=options.job)


def start_agent(
    *, store: Store, name: str, rank: int, world_size: int | None, options: RpcOptions, network: Network | None = None
) -> Agent:
    """Joins the job and returns the running agent; blocks until the world is complete.

    Args:
        store: a new store, shared by all workers, in which they find the coordinator.
        rank: this worker's rank. Rank 0 is the coordinator, or the first worker that joins after rank 0 has left.
        world_size: None if workers join and leave.
        options: the time to wait (`init_timeout`), the address to listen on, and the rest.
        network: this worker's network, if several workers live in one process; the agent takes over the caller's share
            of it. By default the node of the process.

    Raises:
        ConfigError: the name, rank or an option is wrong.
        DuplicateName, WorldMismatch, RendezvousError: the workers' arguments conflict, or workers did not join.
    """
    check_worker_name(name)
    _check_rank(rank, world_size)
    keep_freed_memory()
    if metrics_are_wanted():
        _upper_layers.load("metrics")()  # before this worker joins: the port may be in use
    place: Network = network if network is not None else acquire_node(node_options(options))
    place.expect_role(ROLE)
    try:
        if network is None and rank == 0 and world_size is not None:
            check_descriptors_for(world_size - 1)
        return _join(place, store, Identity(name, rank, new_incarnation()), world_size, options)
    except BaseException:
        place.handle_role(ROLE, None)
        place.release()
        raise


def _check_rank(rank: int, world_size: int | None) -> None:
    if rank < 0 or (world_size is not None and rank >= world_size):
        raise ConfigError(
            f"rank {rank} is not in a world of {world_size}: ranks go from 0 to world_size - 1; "
            "check the arguments of init_rpc, or RANK and WORLD_SIZE"
        )


def _join(network: Network, store: Store, me: Identity, world_size: int | None, options: RpcOptions) -> Agent:
    timeout_s = options.startup_limit_s or float("inf")
    address = network.address or network.serve(_bind_host(options), options.port)
    network.identity = me
    records = SignedRecords(store, network.credentials)
    started = time.monotonic()
    member = Member(me, address, options.role)
    lead = partial(_lead, network, store, records, member, options.peer_timeout)
    if me.id == COORDINATOR and (world_size is not None or not store.check([COORDINATOR_KEY])):
        coordinator = lead()
        reply = coordinator.join(member, world_size, timeout_s)
    else:
        coordinator, reply = _ask_coordinator(network, store, records, member, world_size, timeout_s, lead)
    service = coordinator.service
    if service is not None and service.table.broken is not None:
        # The other workers learn of the contradiction from this process, so it stays until they have their answer.
        network.run(service.all_answered(ATTEMPT_LIMIT_S), 2 * ATTEMPT_LIMIT_S)
    elif service is not None and reply.outcome == JoinReply.TIMED_OUT:
        network.run(service.give_up(reply, ATTEMPT_LIMIT_S), 2 * ATTEMPT_LIMIT_S)
    roster = members_of(reply, me, coordinator.address, time.monotonic() - started)
    _check_device_maps(me, roster.members, world_size, options)
    with _BUILDS:
        agent = Agent(
            network=network,
            coordinator=coordinator,
            me=me,
            roster=roster,
            options=options,
            world_size=world_size,
            store=getattr(store, "underlying_store", store),  # a prefix store closes nothing
            look_up=partial(_look_up, store, records, coordinator.address),
            rref_type=RRef,
            make_rref=RRef._of,
            make_autograd=_upper_layers.load("autograd"),
            make_inspector=Inspector,
            make_leaving=Leaving,
            context_of=context_of,
            current=agent_or_none,
        )
        if metrics_are_wanted():
            _upper_layers.load("metrics")(agent)
        agent.start_serving()
    return agent


def _lead(network: Network, store: Store, records: SignedRecords, me: Member, peer_timeout_s: float) -> Coordinator:
    """Makes this worker the coordinator."""
    rank = me.identity.id
    service = serve_membership(network, me.identity, peer_timeout_s)  # before others can find it
    records.set(COORDINATOR_KEY, me.address if rank == COORDINATOR else f"{me.address} {rank}")

    def mark_left() -> None:
        if _is_at(store, me.address):
            return  # the store ends with this process
        try:
            records.set(COORDINATOR_KEY, LEFT)
        except DistStoreError as exc:
            logger.warning("%s could not record in the store that it has left the job: %s", me.identity.name, exc)

    return Coordinator(network, me.address, me.identity, service, rank, mark_left)


def _place(record: str) -> tuple[str, int]:
    """The address and the rank in the coordinator's record."""
    address, _, rank = record.partition(" ")
    return address, int(rank) if rank.isdecimal() else COORDINATOR


def _bind_host(options: RpcOptions) -> str:
    """The host in the options or the environment; otherwise loopback, or the interface that reaches the coordinator.

    A file and user-defined schemes name no host, so MASTER_ADDR is used as for `env://`. A store outside of the ranks
    takes precedence, since rank 0 may have moved since MASTER_ADDR was set.
    """
    url = urlsplit(options.init_method)
    explicit = options.host or host_from_environment("TP_SOCKET_IFNAME")
    coordinator = url.hostname if url.scheme == "tcp" else launcher_variable("MASTER_ADDR")
    if url.scheme in ("env", "tcp") and (outside := outside_store()) is not None:
        coordinator = outside[0]
    if not coordinator and not explicit and url.scheme != "env":
        logger.info("%s:// names no host, so RPC listens on loopback: for several machines set MASTER_ADDR", url.scheme)
    return pick_bind_host(coordinator or "127.0.0.1", explicit)


def _find_coordinator(records: SignedRecords, timeout_s: float) -> str:
    """The coordinator's record in the store; a store that answers late is asked again until the timeout."""
    deadline = Deadline.after(timeout_s)
    is_first = True
    while True:
        try:
            return records.get([COORDINATOR_KEY], min(INIT_NOTICE_S, deadline.remaining_s()))[0]
        except StoreTimeout as exc:
            if deadline.expired():
                raise RendezvousError(
                    f"the coordinator (rank 0) did not join within {timeout_s:.1f} s; start it with the same "
                    f"init_method, MASTER_ADDR and MASTER_PORT, and see its log ({exc})"
                ) from exc
        if is_first:
            is_first = False
            logger.warning(
                "init_rpc still waits after %g s for the coordinator (rank 0), whose address is not in the store yet",
                INIT_NOTICE_S,
            )


def _ask_coordinator(
    network: Network,
    store: Store,
    records: SignedRecords,
    me: Member,
    world_size: int | None,
    timeout_s: float,
    lead: Callable[[], Coordinator],
) -> tuple[Coordinator, JoinReply]:
    """Joins at the address in the store, and reads it again if it is that of a lost coordinator.

    In an elastic world, this worker becomes the coordinator if the coordinator has left, or was a lost worker of the
    same rank.
    """
    deadline = Deadline.after(timeout_s)
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
    while True:
        record = _find_coordinator(records, deadline.remaining_s())
        address, rank = _place(record)
        leads = record != LEFT and rank == me.identity.id
        if record == LEFT and world_size is None:
            leads = records.replace(COORDINATOR_KEY, LEFT, f"{LEFT} {me.identity.id}")
        if leads:
            coordinator = lead()
            return coordinator, coordinator.join(me, world_size, deadline.remaining_s())
        if address == LEFT:
            if deadline.expired():
                raise RendezvousError(
                    f"the coordinator has left the job, and the next one (rank {rank}) did not start within "
                    f"{timeout_s:.1f} s; start it again"
                )
            pause(next(pauses))
            continue
        coordinator = Coordinator(network, address, me.identity, None, rank)
        remaining_s = deadline.remaining_s()
        connect_s = remaining_s if _is_at(store, address) else min(remaining_s, ANSWER_LIMIT_S)
        try:
            reply = coordinator.join(me, world_size, remaining_s, connect_s)
            if world_size is not None or reply.outcome != JoinReply.Outcome.TIMED_OUT or deadline.expired():
                return coordinator, reply
            pause(next(pauses))  # the coordinator leaves, or waits for the members of the one before
        except RpcdistError as exc:
            is_outside = not _is_at(store, address)  # the store does not end with the coordinator
            if world_size is None and is_outside:
                if records.get([COORDINATOR_KEY], QUICK_ANSWER_LIMIT_S)[0] != record:
                    continue  # it was leaving
            if not isinstance(exc, ConnectFailed):
                raise
            if deadline.expired():
                reason = exc.reason
                if is_outside:
                    reason += (
                        f". The store names this as the address of rank {rank}, which {me.identity.name!r} joins "
                        f"through: rank {rank} has ended, or cannot be reached from here. Start it again"
                    )
                raise ConnectFailed(exc.address, reason, timeout_s) from exc


def _is_at(store: Store, coordinator: str) -> bool:
    """Whether the coordinator serves the store at its own port, so that its successor has the same address."""
    try:
        return split_address(store.address)[1] == split_address(coordinator)[1]
    except ConfigError:
        return False  # a file, or memory


def _look_up(store: Store, records: SignedRecords, before: str) -> str:
    """The address of the next coordinator; blocks, bounded.

    If the last coordinator served the store at its own port, the store has ended with it, and its successor is at the
    store's configured address, a host name for example, which may have another IP address now.
    """
    if _is_at(store, before):
        return store.address
    address, _ = _place(records.get([COORDINATOR_KEY], QUICK_ANSWER_LIMIT_S)[0])
    if address == LEFT:
        raise RendezvousError("the coordinator has left the job, and no other one has started yet")
    return address


def _check_device_maps(me: Identity, members: Sequence[Member], world_size: int | None, options: RpcOptions) -> None:
    known = {member.identity.name for member in members}
    # A worker that joins after the loss of rank 0, while others are missing, cannot tell missing names from wrong ones.
    is_complete = world_size is None or len(members) >= world_size
    for target, device_map in options.device_maps.items():
        if is_complete and target not in known:
            raise ValueError(f"Node {me.name} has invalid target node names in its device maps: {target!r}")
        check_own_devices(me.name, target, device_map)
