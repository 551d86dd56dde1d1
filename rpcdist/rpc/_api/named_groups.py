"""`new_group`: a process group of workers by their names, which other workers do not know."""

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
from rpcdist.collectives._group.creation import open_group, timeout_of_group
from rpcdist.collectives._group.world import current_world
from rpcdist.collectives.backends import Backend, BackendConfig
from rpcdist.deadline import Deadline
from rpcdist.errors import (
    CallRefused,
    ConfigError,
    RankLost,
    StoreTimeout,
    TransportError,
    WorkerLost,
    abridged,
    listed,
)
from rpcdist.ids import Identity
from rpcdist.rpc._api.many_workers import chosen_workers
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.rpc._membership.roster_news import MembershipChange
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import calling_worker
from rpcdist.time_limits import MIN_WAIT_S, QUICK_ANSWER_LIMIT_S
from rpcdist.transport import Node
from rpcdist.transport.addresses import split_address
from rpcdist.waiters import wake_threadsafe

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

Members = tuple[tuple[str, int], ...]
"""Names and incarnations of the members, by rank."""


class _OwnGroups:
    """The groups by names that a worker has made, or leads."""

    def __init__(self) -> None:
        self._num_made: dict[Members, int] = {}
        self._addresses: dict[tuple[Members, int], tuple[str, int]] = {}
        self._questions: list[tuple[tuple[Members, int], Callable[[], object]]] = []  # what wakes those that wait
        self._lock = threading.Lock()

    def next_number(self, members: Members) -> int:
        """Counts the groups of the same members, which all of them make in the same order."""
        with self._lock:
            number = self._num_made.get(members, 0)
            self._num_made[members] = number + 1
        return number

    def lead(self, members: Members, number: int, host: str, port: int) -> None:
        """Tells the others where the store of a group is."""
        with self._lock:
            self._addresses[members, number] = (host, port)
            questions = [wake for group, wake in self._questions if group == (members, number)]
        for wake in questions:
            wake()

    def end(self, members: Members, number: int) -> None:
        """All of them have come, or one cannot."""
        with self._lock:
            self._addresses.pop((members, number), None)

    async def wait_for(self, members: Members, number: int, limit_s: float) -> tuple[str, int] | None:
        """The address of the store of a group, when this worker leads it; None if it does not in time."""
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


_groups: Final[weakref.WeakKeyDictionary[Agent, _OwnGroups]] = weakref.WeakKeyDictionary()


def _own_groups() -> _OwnGroups:
    return _groups.setdefault(current_agent(), _OwnGroups())


async def _where_is(members: list[list[Any]], number: int) -> tuple[str, int] | None:
    """At the first member of a group: where its store is; None if it is not made in a while.

    A coroutine, as a member that asks a thousand times must not take a thread for each.
    """
    try:
        key = tuple((name, int(incarnation)) for name, incarnation in members)
        if not all(isinstance(name, str) for name, _ in key):
            raise TypeError
    except (TypeError, ValueError, OverflowError) as exc:
        raise CallRefused(f"these are no members of a group: {abridged(members)}") from exc
    asking = calling_worker.get()
    if asking is None or (asking.name, asking.incarnation) not in key:
        raise CallRefused(f"the store of a group is told to its members: {abridged(members)}")
    return await _own_groups().wait_for(key, number, QUICK_ANSWER_LIMIT_S)


@off_loop("await rpc.new_group_async(...)")
def new_group(
    workers: str | Iterable[Destination],
    backend: str | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> ProcessGroup:
    """A process group of workers. Each of them calls this with the same workers; other workers take no part.

        group = rpc.new_group(["trainer0", "trainer1"])
        collectives.all_reduce(gradients, group=group)

    There need not be a default group. The rank of a worker in the group is its place in the list, or in a role the
    order of the workers' ranks. When a member dies, operations of the group end with an error that names it; those that
    are left may make a new one.

    Args:
        workers: names, ranks or `WorkerInfo`; or the role of those that live, a text.
        backend: as in `init_process_group`.
        timeout: limit of making it, and of each operation; 30 minutes by default, 10 for `nccl` alone.
        group_desc: the purpose of the group, for people; its members by default.

    Raises:
        ConfigError: this worker is not among them, one of them twice, or there is no such backend.
        UnknownWorker: somebody is not in the job.
        RankLost: a member died before all had come.
        StoreTimeout: a member did not call this in time.
        CollectiveMismatch: a member asked for another backend.
        BlockingInLoop: called on an event loop.
    """
    agent = current_agent()
    directory = agent.directory
    identities = [directory.member(directory.resolve(worker)).identity for worker in chosen_workers(workers)]
    names = [identity.name for identity in identities]
    if len(set(names)) < len(names):
        raise ConfigError(f"a worker is in a group once, not twice: {listed(names)}")
    if agent.worker_name not in names:
        raise ConfigError(f"{agent.worker_name!r} is not among the workers of this group: {listed(names)}")
    backend = "tcp" if backend is None else Backend(backend)
    limit = timeout_of_group(backend, timeout)
    members = tuple((identity.name, identity.incarnation) for identity in identities)
    rank, own = names.index(agent.worker_name), _own_groups()
    number = own.next_number(members)
    title = f"the group of {listed(names)}"

    def check() -> None:
        for other, identity in enumerate(identities):
            if other != rank and not _lives(directory, identity):
                raise RankLost(f"making {title}", f"worker {identity.name!r} is lost", (other,))

    store = _lead(agent, limit) if rank == 0 else _follow(agent, identities[0], members, number, limit, title)
    try:
        if rank == 0:
            own.lead(members, number, _host_of(agent), store.port)
        numbers = tuple(range(len(names)))
        described = f"a group with backend {BackendConfig(backend)}"
        part = agree(
            PrefixStore(f"workers/{number}", store),
            rank,
            numbers,
            title,
            limit.total_seconds(),
            described,
            fresh=True,
            check=check,
        )
        unique = hashlib.sha256(f"{members} {number}".encode()).hexdigest()[:8]
        by_rank = ", ".join(f"{number}: {name}" for number, name in enumerate(names))
        name = f"workers {by_rank} ({unique})"  # errors have it, which name ranks
        description = title if group_desc is None else group_desc
        group = open_group(
            name,
            rank,
            numbers,
            part,
            backend=backend,
            timeout=limit,
            options=None,
            device=None,
            description=description,
            check=check,
            outlives_ranks=True,
        )
    except BaseException as exc:
        if rank == 0:
            store.note_failure(str(exc))  # the others learn it with the end of the store
        store.close()
        raise
    finally:
        if rank == 0:
            own.end(members, number)
    current_world().groups[name] = group
    _end_with_members(agent, group, names)
    return group


new_group_async = async_form(new_group)
"""`new_group` as a coroutine function."""


def _lives(directory: Directory, identity: Identity) -> bool:
    return directory.living_incarnation(identity.name) == identity.incarnation


def _lead(agent: Agent, limit: timedelta) -> TCPStore:
    """The store in which the members find each other; it goes with the group."""
    return TCPStore(_host_of(agent), 0, None, True, limit, wait_for_workers=False)


def _follow(agent: Agent, leader: Identity, members: Members, number: int, limit: timedelta, title: str) -> TCPStore:
    deadline = Deadline.after(limit.total_seconds())
    asked = [list(member) for member in members]
    found = None
    while found is None:
        if deadline.expired():
            raise StoreTimeout(f"worker {leader.name!r}, the first of {title}, did not make it within {limit}")
        left_s = max(MIN_WAIT_S, deadline.remaining_s())
        try:
            found = agent.caller.sync(leader.id, _where_is, (asked, number), None, left_s)
        except WorkerLost as exc:
            raise RankLost(f"making {title}", str(exc), (0,)) from exc
    host, port = found
    if not isinstance(host, str) or not isinstance(port, int):
        raise TransportError(f"worker {leader.name!r} said that the store of {title} is at {abridged(found)}")
    left = timedelta(seconds=max(1.0, deadline.remaining_s()))
    return TCPStore(host, port, None, False, left, wait_for_workers=False)


def _host_of(agent: Agent) -> str:
    network = agent.network
    address = network.address if isinstance(network, Node) else None
    return "127.0.0.1" if address is None else split_address(address)[0]


def _end_with_members(agent: Agent, group: ProcessGroup, names: list[str]) -> None:
    """Has the group end when a member is lost or leaves, also where no operation runs that would notice it."""
    reference = weakref.ref(group)

    def changed(change: MembershipChange) -> None:
        name = change.worker.name
        if change.kind != "joined" and name in names and (living := reference()) is not None:
            how = "has left" if change.kind == "left" else f"is lost: {change.reason}"
            living.abort(f"worker {name!r}, rank {names.index(name)} of it, {how}")

    weakref.finalize(group, agent.watch.add(changed)).atexit = False
