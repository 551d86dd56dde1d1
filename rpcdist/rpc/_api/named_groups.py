"""`new_group`: makes a process group of named workers; other workers do not take part."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcdist.collectives import PrefixStore, ProcessGroup, TCPStore
from rpcdist.collectives._group.bootstrap import agree
from rpcdist.collectives._group.creation import GroupSettings, open_group, timeout_of_group
from rpcdist.collectives._group.world import current_world
from rpcdist.collectives.backends import Backend, BackendConfig
from rpcdist.deadline import Deadline
from rpcdist.errors import (
    CallRefused,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    RankLost,
    StoreTimeout,
    TransportError,
    WorkerLost,
    abridged,
    listed,
    on_error,
    text_of,
)
from rpcdist.giving_up import check_not_given_up, wake_if_given_up
from rpcdist.ids import Identity
from rpcdist.rpc._api.many_workers import chosen_workers
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._current import agent_local, current_agent
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.rpc._membership.roster_news import MembershipChange
from rpcdist.rpc._peers.network import calling_worker
from rpcdist.time_limits import QUICK_ANSWER_LIMIT_S
from rpcdist.transport import Node
from rpcdist.transport.addresses import split_address
from rpcdist.waiters import wake_threadsafe

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

Members = tuple[tuple[str, int], ...]
"""Names and incarnations of the members, by rank."""


class _OwnGroups:
    """The named groups that this worker has made or leads."""

    def __init__(self) -> None:
        self._num_made: dict[Members, int] = {}
        self._addresses: dict[tuple[Members, int], tuple[str, int]] = {}
        self._questions: list[tuple[tuple[Members, int], Callable[[], object]]] = []  # wakes the waiters
        self._lock = threading.Lock()

    def next_number(self, members: Members) -> int:
        """Numbers the groups with the same members, which every member makes in the same order."""
        with self._lock:
            number = self._num_made.get(members, 0)
            self._num_made[members] = number + 1
        return number

    def not_made(self, members: Members, number: int) -> None:
        """Gives the number back, as the other members may not have begun to make this group."""
        with self._lock:
            if self._num_made[members] == number + 1:
                self._num_made[members] = number

    def lead(self, members: Members, number: int, host: str, port: int) -> None:
        """Publishes the address of a group's store to the other members."""
        with self._lock:
            self._addresses[members, number] = (host, port)
            questions = [wake for group, wake in self._questions if group == (members, number)]
        for wake in questions:
            wake()

    def end(self, members: Members, number: int) -> None:
        """Withdraws the address, because all members have joined or one cannot."""
        with self._lock:
            self._addresses.pop((members, number), None)

    async def wait_for(self, members: Members, number: int, limit_s: float) -> tuple[str, int] | None:
        """Waits for the address of the store of a group that this worker will lead; None on timeout."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        question = ((members, number), partial(wake_threadsafe, waiter))
        with self._lock:
            if question[0] in self._addresses:
                return self._addresses[question[0]]
            self._questions.append(question)
        try:
            await asyncio.wait([waiter], timeout=limit_s)
        finally:
            waiter.cancel()
            with self._lock:
                self._questions.remove(question)
        return self._addresses.get(question[0])


_own_groups: Final = agent_local(_OwnGroups)


async def _where_is(members: list[list[Any]], number: int) -> tuple[str, int] | None:
    """At the first member of a group: returns the address of the group's store; None on timeout.

    A coroutine, so that a member's repeated requests do not occupy threads.
    """
    try:
        key = tuple((name, int(incarnation)) for name, incarnation in members)
        if not all(isinstance(name, str) for name, _ in key):
            raise TypeError
    except (TypeError, ValueError, OverflowError) as exc:
        raise CallRefused(f"the members of a group must be (name, incarnation) pairs, not {abridged(members)}") from exc
    asking = calling_worker.get()
    if asking is None or (asking.name, asking.incarnation) not in key:
        raise CallRefused(f"only the members of a group may ask for its store: {abridged(members)}")
    return await _own_groups().wait_for(key, number, QUICK_ANSWER_LIMIT_S)


@off_loop("await rpc.new_group_async(...)")
def new_group(
    workers: str | Iterable[Destination],
    backend: str | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Makes a process group of workers. Every member calls this with the same workers; other workers take no part.

        group = rpc.new_group(["trainer0", "trainer1"])
        collectives.all_reduce(gradients, group=group)

    No default group is needed. A worker's rank in the group is its position in the list; for a role, the order of the
    workers' ranks. If a member dies, the group's operations fail with an error that names it; the remaining workers can
    make a new group.

    Args:
        workers: names, ranks or `WorkerInfo`; or a role, as a string, for all living workers with that role.
        backend: as in `init_process_group`.
        timeout: limit for making the group, and for each operation; 30 minutes by default, 10 for `nccl` alone.
        group_desc: a description of the group, for people; by default its members.

    Raises:
        ConfigError: this worker is not in the list, a worker is in it twice, or the backend is unknown.
        UnknownWorker: a worker is not in the job.
        RankLost: a member died before all members had joined.
        StoreTimeout: a member did not call this in time.
        CollectiveMismatch: a member used another backend.
        BlockingInLoop: called on an event loop.
    """
    agent = current_agent()
    directory = agent.directory
    identities = [directory.member(directory.resolve(worker)).identity for worker in chosen_workers(workers)]
    names = [identity.name for identity in identities]
    if len(set(names)) < len(names):
        raise ConfigError(f"the workers of a group must be distinct: {listed(names)}")
    if agent.worker_name not in names:
        raise ConfigError(f"this worker, {agent.worker_name!r}, is not among the workers of the group: {listed(names)}")
    backend = "tcp" if backend is None else Backend(backend)
    limit = timeout_of_group(backend, timeout)
    members = tuple((identity.name, identity.incarnation) for identity in identities)
    rank, own = names.index(agent.worker_name), _own_groups()
    number = own.next_number(members)
    title = f"the group of {listed(names)}"

    def check() -> None:
        for other, identity in enumerate(identities):
            if other != rank and not directory.lives(identity):
                raise RankLost(f"making {title}", f"worker {identity.name!r} is lost", (other,))

    with on_error(partial(own.not_made, members, number)):
        store = _lead(agent, limit) if rank == 0 else _follow(agent, identities[0], members, number, limit, title)
    try:
        if rank == 0:
            own.lead(members, number, _host_of(agent), store.port)
        numbers = tuple(range(len(names)))
        described = f"a group with backend {BackendConfig(backend)}"
        base, limit_s = PrefixStore(f"workers/{number}", store), limit.total_seconds()
        part = agree(base, rank, numbers, title, limit_s, described, fresh=True, check=check)
        unique = hashlib.sha256(f"{members} {number}".encode()).hexdigest()[:8]
        by_rank = ", ".join(f"{number}: {name}" for number, name in enumerate(names))
        name = f"workers {by_rank} ({unique})"  # shown in errors that name ranks
        description = title if group_desc is None else group_desc
        settings = GroupSettings(backend, limit, description, outlives_ranks=True)
        group = open_group(name, rank, numbers, part, settings, check=check)
    except BaseException as exc:
        own.not_made(members, number)
        if rank == 0:
            store.note_failure(text_of(exc))  # the other members get this when the store closes
        store.close()
        raise
    finally:
        if rank == 0:
            own.end(members, number)
    current_world().groups[name] = group
    _end_with_members(agent, group, names)
    return group


new_group_async = async_form(new_group, ends_waits=True)
"""`new_group` as a coroutine function."""


def _lead(agent: Agent, limit: timedelta) -> TCPStore:
    """Makes the store in which the members find each other; it closes with the group."""
    return TCPStore(_host_of(agent), 0, None, True, limit, wait_for_workers=False)


def _follow(agent: Agent, leader: Identity, members: Members, number: int, limit: timedelta, title: str) -> TCPStore:
    deadline = Deadline.after(limit.total_seconds())
    asked = [list(member) for member in members]
    found = None
    while found is None:
        if deadline.expired():
            raise StoreTimeout(
                f"worker {leader.name!r}, the first member of {title}, did not call new_group within {limit}"
            )
        asking = agent.caller.start_call(leader.id, Invocation(_where_is, (asked, number), None, deadline.timeout_s()))
        wake_if_given_up(asking.cancel)
        try:
            found = asking.wait()
        except DeadlineExceeded:
            continue
        except Cancelled:
            check_not_given_up()
            raise
        except WorkerLost as exc:
            raise RankLost(f"making {title}", text_of(exc), (0,)) from exc
    host, port = found
    if not isinstance(host, str) or not isinstance(port, int):
        raise TransportError(
            f"worker {leader.name!r} sent an invalid address of the store of {title}: {abridged(found)}"
        )
    left = timedelta(seconds=max(1.0, deadline.remaining_s()))
    return TCPStore(host, port, None, False, left, wait_for_workers=False)


def _host_of(agent: Agent) -> str:
    network = agent.network
    address = network.address if isinstance(network, Node) else None
    return "127.0.0.1" if address is None else split_address(address)[0]


def _end_with_members(agent: Agent, group: ProcessGroup, names: list[str]) -> None:
    """Aborts the group when a member is lost or leaves, even if no operation is running."""
    reference = weakref.ref(group)

    def changed(change: MembershipChange) -> None:
        name = change.worker.name
        if change.kind != "joined" and name in names and (living := reference()) is not None:
            how = "has left" if change.kind == "left" else f"is lost: {change.reason}"
            living.abort(f"worker {name!r}, rank {names.index(name)} of it, {how}")

    weakref.finalize(group, agent.watch.add(changed)).atexit = False
