"""The members of the job as this worker knows them, and the events of workers and connections.

Members are the workers that the coordinator lists, except those that this worker itself has declared lost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Final, Generic, Literal, NamedTuple, ParamSpec

from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError, UnknownWorker, WorkerLost
from rpcdist.giving_up import check_not_given_up, wake_if_given_up
from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import Session

logger = logging.getLogger(__name__)

COORDINATOR: Final = 0
"""The rank of the worker that keeps the list of members, by default; see `Directory.coordinator`."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, the address at which it listens (host:port), and its role, as the program describes it."""

    identity: Identity
    address: str
    role: str = ""

    def __str__(self) -> str:
        return f"{self.identity.name!r} (rank {self.identity.id}, {self.address})"


class Roster(NamedTuple):
    """The coordinator's list of members, or a difference from an earlier version of it.

    Attributes:
        version: grows with every change of the list.
        members: the members; in a difference, those that have joined since the version `base`.
        departures: the members that are gone, and why each was declared lost; an empty text if it has left.
        base: the version to which this is a difference; 0 for the whole list.
    """

    version: int
    members: Sequence[Member]
    departures: Mapping[Identity, str] = {}
    base: int = 0


class MemberEvent(NamedTuple):
    """A worker joined, left or was lost.

    Attributes:
        kind: "lost" if it died, or was replaced by another process; "left" if it has shut down.
        reason: why it was declared lost; else empty.
    """

    kind: Literal["joined", "left", "lost"]
    member: Member
    reason: str = ""


@dataclass(eq=False, repr=False)
class Directory:
    """The members of the job. Any thread may use it.

    The coordinator sends every change. This worker asks it only when an unknown worker turns up, or a known one cannot
    be reached: never, in a job in which no worker joins or leaves.

    A worker *lives* while the coordinator lists it and this worker's own detector has not declared it lost.

    Args:
        ask: asks the coordinator for the members, and waits at most the given time; by default for its own limit.
        ask_async: the same on the I/O loop.
        on_replaced: called on the I/O loop when another process has taken the place of a member.
        on_event: called on the I/O loop when a worker joined, left or was lost.
        coordinator: the rank of the worker that keeps the list: 0, unless rank 0 had left before, and another worker
            was the first one to join afterwards.
    """

    me: Identity
    first: InitVar[Roster]
    _ask: Callable[[float | None], Roster]
    _ask_async: Callable[[], Awaitable[Roster]]
    _io: IoLoop
    _on_replaced: Callable[[Identity], object]
    _on_event: Callable[[MemberEvent], object]
    coordinator: int = COORDINATOR
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _replaced: set[Identity] = field(default_factory=set)  # one entry for each process that was replaced during ours
    _suspected: dict[Identity, str] = field(default_factory=dict)  # listed by the coordinator, but declared lost here
    _first_living: Identity | None = None  # if it is known
    # Name and reason of the lost workers whose places are free.
    _losses: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self, first: Roster) -> None:
        self._changed = threading.Condition(self._lock)
        # Without events, since these workers were there at the start. In a large world this is the cost of `init_rpc`.
        self.version = first.version
        self._by_id: dict[int, Member] = {member.identity.id: member for member in first.members}
        self._by_name: dict[str, int] = {member.identity.name: id for id, member in self._by_id.items()}
        self._present = set(self._by_id)
        # The living members are changed under the lock; readers copy them in one step, and need no lock.
        self._living = dict(self._by_id)

    # ------------------------------------------------------------ news from the coordinator

    def update(self, roster: Roster) -> None:
        """Applies a list of the coordinator, unless a newer one is known.

        Workers that left stay known, so that errors can name them. A difference from a version that is not known here
        yet changes nothing; this worker then asks the coordinator for the list.
        """
        if roster.base > self.version:
            self.refresh_soon()
            return
        replaced, events = self._take(roster)
        if replaced or events:
            self._io.call_soon(self._publish, replaced, events)

    def _publish(self, replaced: list[Identity], events: list[MemberEvent]) -> None:
        for identity in replaced:
            self._on_replaced(identity)
        for event in events:
            self._on_event(event)

    def _take(self, roster: Roster) -> tuple[list[Identity], list[MemberEvent]]:
        replaced: list[Identity] = []
        with self._lock:
            if roster.version < self.version:
                return [], []
            self.version = roster.version
            came = {member.identity.id for member in roster.members}
            if roster.base:
                left = {identity.id for identity in roster.departures if self._is_present(identity)}
                self._present -= left
                self._present |= came
                changed = came | left
            else:
                changed = came | self._present
                self._present = came
            for member in roster.members:
                old = self._by_id.get(member.identity.id)
                if old is not None and old.identity != member.identity:
                    replaced.append(old.identity)
                    self._replaced.add(old.identity)
                    if self._by_name.get(old.identity.name) == old.identity.id:  # not if another rank has the name now
                        del self._by_name[old.identity.name]
                self._by_id[member.identity.id] = member
                self._by_name[member.identity.name] = member.identity.id
            return replaced, self._recount(changed, roster.departures)

    def _is_present(self, identity: Identity) -> bool:
        return identity.id in self._present and self._by_id[identity.id].identity == identity

    def on_lost(self, identity: Identity, error: WorkerLost) -> None:
        """Records that this worker's own detector has declared a worker lost."""
        with self._lock:
            self._suspected[identity] = error.reason
            events = self._recount({identity.id}, {})
        self._publish([], events)

    def on_found(self, identity: Identity) -> None:
        """Records that a worker that was declared lost here lives. On the I/O loop."""
        with self._lock:
            if self._suspected.pop(identity, None) is None:
                self._changed.notify_all()
                return
            events = self._recount({identity.id}, {})
        self._publish([], events)

    def on_left(self, identity: Identity) -> None:
        """Records that a worker leaves, as it has told this one. On the I/O loop."""
        with self._lock:
            if not self._is_present(identity):
                return
            self._present.discard(identity.id)
            events = self._recount({identity.id}, {})
        self._publish([], events)

    def _recount(self, ids: set[int], departures: Mapping[Identity, str]) -> list[MemberEvent]:
        """Compares which of these workers live now with which lived before; needs the lock."""
        listed = {id: self._by_id[id] for id in ids & self._present}
        own = self._by_id.get(self.me.id)
        if self.me.id in ids and own is not None and own.identity == self.me:
            listed[self.me.id] = own  # this worker lives, even if the coordinator declared it lost
        if self._suspected:  # a suspicion concerns one process: it ends when the process has lost its place
            for suspect in [one for one in self._suspected if one.id in ids]:
                if suspect.id not in listed or listed[suspect.id].identity != suspect:
                    del self._suspected[suspect]
        gone, joined = [], []
        is_start = not self._living
        for id in sorted(ids):
            old, new = self._living.get(id), listed.get(id)
            if new is not None and new.identity in self._suspected:
                new = None
            if old is not None and (new is None or new.identity != old.identity):
                gone.append(self._departed(old, id in listed, departures))
            if new is None:
                self._living.pop(id, None)
                continue
            self._living[id] = new
            if (old is None or old.identity != new.identity) and not is_start:
                self._losses.pop(id, None)
                joined.append(MemberEvent("joined", new))
        self._first_living = None
        self._changed.notify_all()
        return gone + joined

    def _departed(self, old: Member, is_listed: bool, departures: Mapping[Identity, str]) -> MemberEvent:
        why = self._suspected.get(old.identity) or departures.get(old.identity, "")
        if is_listed and not why:
            why = "another process took its place"
        if why:
            self._losses[old.identity.id] = (old.identity.name, why)
        return MemberEvent("lost" if why else "left", old, why)

    def roster(self) -> Roster:
        """The living members, and the version of the list that this worker knows."""
        with self._lock:
            return Roster(self.version, [member for _, member in sorted(self._living.items())])

    def refresh(self, limit_s: float | None = None) -> None:
        """Asks the coordinator for the members; blocks, for `limit_s` at most if it is given."""
        self.update(self._ask(limit_s))

    def refresh_soon(self) -> None:
        """Asks the coordinator for the members in the background; any thread."""
        self._io.call_soon(lambda: self._io.spawn(self.refresh_async(), "rpcdist ask for the members"))

    async def refresh_async(self) -> None:
        """Asks the coordinator for the members, on the I/O loop. If the answer is missing, only logs that."""
        try:
            self.update(await self._ask_async())
        except RpcdistError as exc:
            logger.warning("the coordinator did not send the list of workers: %s", exc)

    async def look_up(self, workers: Iterable[object]) -> None:
        """Asks the coordinator for the members if one of the destinations is unknown here; on any event loop."""
        if any(self.find(worker) is None for worker in workers):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.refresh_async(), self._io.loop))

    def is_news(self, identity: Identity) -> bool:
        """Whether a worker that connected is new, or a new incarnation of a known one."""
        known = self._by_id.get(identity.id)
        return known is None or known.identity != identity

    def was_replaced(self, identity: Identity) -> bool:
        """Whether another process has taken the place of this one, which may not have noticed yet."""
        return identity in self._replaced

    def was_worker(self, id: int, incarnation: int) -> bool:
        """Whether a process is a worker of the job, or was one before another took its place."""
        known = [identity.incarnation for identity in self._replaced if identity.id == id]
        return incarnation in (self.incarnation_of(id), *known)

    def holder_of(self, id: int) -> str | None:
        """The name of the worker that lives at a rank; None if no worker is known to live there."""
        member = self._living.get(id)
        return None if member is None else member.identity.name

    # ------------------------------------------------------------ looking up

    def resolve(self, to: object, limit_s: float | None = None) -> int:
        """The id of a destination: a name, a rank, or a `WorkerInfo`.

        Asks the coordinator about a name that is unknown here, and waits, for `limit_s` at most if it is given; on an
        event loop's thread, which must not block, it asks in the background, for the next call.

        Raises:
            UnknownWorker: no worker of that name or rank is in the job.
            DeadlineExceeded: the coordinator did not answer in time.
            ConfigError: `to` is none of the three.
        """
        worker_id = self._by_name.get(to) if type(to) is str else self.find(to)
        if worker_id is not None:
            return worker_id
        is_on_loop = asyncio._get_running_loop() is not None
        if is_on_loop:
            self.refresh_soon()
        else:
            try:
                self.refresh(limit_s)
            except DeadlineExceeded as exc:
                raise DeadlineExceeded(
                    f"worker {to} is unknown here, and the coordinator (rank {self.coordinator}) did not say in time "
                    f"whether it is in the job. Check that rank {self.coordinator} is not stopped or overloaded"
                ) from exc
        worker_id = self.find(to)
        if worker_id is None:
            error = self._unknown(to.name if isinstance(to, WorkerInfo) else f"{to}")
            if is_on_loop:
                error.add_note(
                    "This function does not wait on an event loop, and a worker that has just joined may be unknown "
                    "here. The functions that wait for the coordinator's answer find it: rpc_async, rpc_stream, and "
                    "those that end in _async, such as `await rpc.remote_async(...)`."
                )
            raise error
        return worker_id

    def find(self, to: object) -> int | None:
        """The id of a destination, None if it is unknown here; asks nobody. Raises `ConfigError` as `resolve` does."""
        if isinstance(to, str):
            return self._by_name.get(to)
        if isinstance(to, WorkerInfo):
            return to.id if to.id in self._by_id else None
        if isinstance(to, int) and not isinstance(to, bool):
            return to if to in self._by_id else None
        raise ConfigError(f"the destination must be a worker's name, rank or WorkerInfo, but it is {to!r}")

    def _unknown(self, wanted: str) -> UnknownWorker:
        return UnknownWorker(f"name:{self.me.name},rank:{self.me.id}", wanted, sorted(self._by_name))

    def knows(self, worker_id: int) -> bool:
        return worker_id in self._by_id

    def member(self, worker_id: int) -> Member:
        """The member with this id; raises `UnknownWorker`."""
        member = self._by_id.get(worker_id)
        if member is None:
            raise self._unknown(str(worker_id))
        return member

    def name_of(self, worker_id: int) -> str:
        """The name of a worker; a text with the id if it is unknown."""
        member = self._by_id.get(worker_id)
        return member.identity.name if member is not None else f"worker {worker_id}"

    def incarnation_of(self, worker_id: int) -> int:
        """The incarnation of the process that has this id now; 0 if none is known."""
        member = self._by_id.get(worker_id)
        return member.identity.incarnation if member is not None else 0

    def living_incarnation(self, name: str) -> int:
        """The incarnation of the worker of this name, if it lives; else 0."""
        worker_id = self._by_name.get(name)
        member = None if worker_id is None else self._living.get(worker_id)
        return 0 if member is None or member.identity.name != name else member.identity.incarnation

    def lives(self, identity: Identity) -> bool:
        """Whether this very process is a worker that lives."""
        member = self._living.get(identity.id)
        return member is not None and member.identity == identity

    def is_living(self, worker_id: int) -> bool:
        return worker_id in self._living

    @property
    def num_living(self) -> int:
        return len(self._living)

    def living(self) -> list[Member]:
        """The members that live, by id."""
        return [member for _, member in sorted(self._living.items())]

    def known(self) -> list[Member]:
        """All members, including those that have left or died, by id."""
        with self._lock:
            return [member for _, member in sorted(self._by_id.items())]

    def suspected(self) -> list[Identity]:
        """The members that the coordinator lists, but this worker's own detector has declared lost."""
        return list(self._suspected)

    def first_living(self) -> Identity:
        """The living worker of the lowest rank; this one, if it knows of no other."""
        found = self._first_living
        if found is None:
            with self._lock:
                first = min(self._living, default=None)
                found = self._first_living = self.me if first is None else self._living[first].identity
        return found

    def losses(self) -> dict[str, str]:
        """The workers that were lost and have not come back or been replaced, and why, by name."""
        with self._lock:
            return {name: why for _, (name, why) in sorted(self._losses.items())}

    def wait_until_lives(self, name: str, deadline: Deadline) -> WorkerInfo:
        """Waits until a worker of this name is in the job and lives; blocks.

        Raises:
            DeadlineExceeded: the time limit expired.
        """
        waited_s = deadline.remaining_s()
        while name not in (living := {member.identity.name: member.identity.id for member in self.living()}):
            if deadline.expired():
                raise DeadlineExceeded(
                    f"worker {name!r} did not join within {waited_s:.3g} s; the job has these workers: "
                    f"{', '.join(sorted(living))}. Check that it was started under this name, with the same "
                    "MASTER_ADDR and MASTER_PORT, and see its log"
                )
            self.wait_while(lambda: all(member.identity.name != name for member in self.living()), deadline)
        return WorkerInfo(name, living[name])

    def wait_while(self, condition: Callable[[], bool], deadline: Deadline) -> None:
        """Waits while a condition holds, which is checked again at each change of the workers; blocks."""
        wake_if_given_up(self._wake)
        with self._changed:
            while condition() and not deadline.expired():
                check_not_given_up()
                self._changed.wait(min(longest_sleep_s(), deadline.remaining_s()))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def info(self, worker_id: int) -> WorkerInfo:
        return WorkerInfo(self.name_of(worker_id), worker_id)

    def infos(self, present: bool = False) -> list[WorkerInfo]:
        """All members, by id; with `present`, without those that have left or died."""
        with self._lock:
            members = [member for id, member in sorted(self._by_id.items()) if not present or id in self._present]
        return [WorkerInfo(member.identity.name, member.identity.id) for member in members]


P = ParamSpec("P")


class Event(Generic[P]):
    """One kind of event, and its listeners."""

    def __init__(self) -> None:
        self._listeners: list[Callable[P, object]] = []

    def listen(self, *listeners: Callable[P, object]) -> None:
        """Registers functions to be called at each event, after those registered before."""
        self._listeners += listeners

    def publish(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls the listeners, in the order of their registration; an exception of one is logged."""
        for listener in self._listeners:
            try:
                listener(*args, **kwargs)
            except Exception:  # the others still need the event
                logger.exception("%r could not handle an event", listener)


class PeerEvents:
    """The events of one agent. They are published on the I/O loop, so listeners must be short and run no user code.

    Attributes:
        opened: a worker has opened a session to this one.
        broken: a session has ended for this reason, in either direction. Messages on it may be lost, and requests stay
            unanswered. The worker may be alive.
        lost: a worker was declared dead. It may come at any time after `broken`, or without it.
        lease_ended: nothing was heard from a worker for the length of a lease.
        replaced: another process has taken the place of this one.
        found: a worker that was declared lost lives: there is a connection with it again.
        member: a worker joined, left or was lost, by the coordinator's list or this worker's own detector.
    """

    def __init__(self) -> None:
        self.opened: Event[[Session]] = Event()
        self.broken: Event[[AnySession, str]] = Event()
        self.lost: Event[[Identity, WorkerLost]] = Event()
        self.lease_ended: Event[[Identity]] = Event()
        self.replaced: Event[[Identity]] = Event()
        self.found: Event[[Identity]] = Event()
        self.member: Event[[MemberEvent]] = Event()
