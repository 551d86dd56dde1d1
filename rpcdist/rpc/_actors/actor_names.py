"""The actors of one owner, by object and by creating reference, and the names of all actors in the job.

The coordinator maps each name to a worker, and that worker holds a reference to the actor. So a name is unique in the
job, a named actor lives as long as its worker, and the name is free again when that worker has ended. The creator
reserves the name before it creates the actor; the reservation ends with the creator.

A new coordinator that replaced another one starts without names. At the first request for an unknown name it asks each
worker once for the names that the worker keeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeGuard

from rpcdist.deadline import Deadline
from rpcdist.errors import ActorNameTaken, CallRefused, Overloaded, RpcdistError, UnknownActor, abridged
from rpcdist.ids import Identity, ProcessId
from rpcdist.inspection import ActorFacts
from rpcdist.rpc._actors.serial_actor import SerialActor, Turn, running_actor
from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._executors.lane import Lane
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import calling_worker, check_speaks_for
from rpcdist.rpc._rref.messages import RRefId
from rpcdist.rpc._rref.proxied import CHECKPOINTED_METHOD
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.time_limits import ATTEMPT_LIMIT_S

_SHARED_KINDS: Final = (
    type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, type, ModuleType, FunctionType,
    BuiltinFunctionType,
)  # fmt: skip
"""Types whose objects may be shared, and have no state that concurrent calls could corrupt."""


class ActorTable:
    """The actors that this worker owns; thread-safe.

    An actor lives from its creation until the last reference made by a `remote(serial=True)` is released. Every
    reference to its object (one that a method made or returned, or another worker's copy) leads to the actor.
    """

    def __init__(self, pool: ThreadPool, user_loop: UserLoop) -> None:
        self._pool = pool
        self._user_loop = user_loop
        self._lock = threading.Lock()  # guards changes of the next two
        self._by_rref: dict[RRefId, SerialActor] = {}
        self._by_object: dict[int, tuple[object, SerialActor]] = {}  # by `id`; the entry keeps the object alive
        # By a reference other than an actor's first: the actor, and the processes that have called through it.
        self._called_by: dict[RRefId, tuple[SerialActor, set[ProcessId]]] = {}

    def __len__(self) -> int:
        return len(self._by_rref)

    def facts(self, now: float, most: int) -> list[ActorFacts]:
        """Describes up to `most` actors; any thread, without a lock."""
        actors = dict.fromkeys(list(islice(self._by_rref.values(), most)))
        return [actor.facts(now) for actor in actors]

    # ------------------------------------------------------------ the life of an actor

    def begin(self, rref: RRefId) -> Lane:
        """Registers an actor that is about to be created; returns the lane to create it on."""
        actor = SerialActor(rref, self._pool, self._user_loop)
        with self._lock:
            self._by_rref[rref] = actor
        return actor.lane

    def born(self, rref: RRefId, value: Any) -> None:
        """Records an actor's object. If another actor already has this object, both become one actor."""
        if isinstance(value, _SHARED_KINDS):
            return
        with self._lock:
            actor = self._by_rref.get(rref)
            if actor is None:
                return
            _, first = self._by_object.setdefault(id(value), (value, actor))
            if first is actor:
                # The methods of a restartable actor have another `self` than the value of the reference.
                is_made_again = CHECKPOINTED_METHOD in vars(type(value))
                objects = (value, value.object) if is_made_again else (value,)
                actor.kind = type(objects[-1]).__qualname__
                actor.num_restarts = value.num_restarts if is_made_again else 0
                ours = [one for one in objects if self._by_object.setdefault(id(one), (one, actor))[1] is actor]
                actor.object_ids = tuple(map(id, ours))
            else:
                first.num_references += 1
                self._by_rref[rref] = first
        if first is not actor:
            actor.lane.close()

    def released(self, rref: RRefId, held: list[object]) -> None:
        """Removes an actor that is no longer referenced. Its object is released on the thread that made it."""
        if (called := self._called_by.pop(rref, None)) is not None:
            called[0].forget(rref, called[1])
        if rref not in self._by_rref:
            return
        with self._lock:
            actor = self._by_rref.pop(rref)
            actor.num_references -= 1
            if actor.num_references:
                return
            held += [self._by_object.pop(one, None) for one in actor.object_ids]
        actor.lane.close(held.clear)

    def close(self) -> None:
        """Ends all actors' threads, because RPC shuts down."""
        with self._lock:
            actors = set(self._by_rref.values())
            ends = [(actor.lane, [self._by_object.pop(one, None) for one in actor.object_ids]) for actor in actors]
        for lane, held in ends:
            lane.close(held.clear)  # not under the lock: may run user code

    def lost(self, identity: Identity) -> None:
        """Drops the calls of a worker that was declared dead; on the I/O loop."""
        with self._lock:
            actors = list(self._by_rref.values())
        if actors:
            self._pool.submit_many([(actor.gone, (identity.process,)) for actor in actors])

    # ------------------------------------------------------------ calls

    def free_lane(self, rref: RRefId) -> Lane | None:
        actor = self._by_rref.get(rref)
        return actor.lane if actor is not None and actor.lane.is_free else None

    def turn(
        self,
        who: Identity,
        rref: RRefId,
        value: object,
        order: object,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Turn | None:
        """Makes the turn of an arrived method call; None if the value is not an actor.

        Args:
            order: the caller's number for the call; None if the caller did not know that the value is an actor.
        """
        if not self._by_rref:
            return None
        actor = self._actor(rref, value)
        if actor is None:
            return None
        number = None if order is None else CallNumber.checked(order)
        self._note_caller(actor, rref, who.process)
        return Turn(actor, value, (who.process, rref), number, method, args, kwargs)

    def over(self, rref: RRefId, value: object, who: ProcessId, stream: int, numbers: tuple[int, ...]) -> None:
        """Records that these calls have ended at the caller, and may never arrive."""
        actor = self._actor(rref, value)
        if actor is not None:
            self._note_caller(actor, rref, who)
            actor.over((who, rref), stream, numbers)

    def _note_caller(self, actor: SerialActor, rref: RRefId, who: ProcessId) -> None:
        """Records a caller whose queue the actor can drop once the reference is released."""
        if rref != actor.rref:
            self._called_by.setdefault(rref, (actor, set()))[1].add(who)

    def is_actor(self, value: object) -> bool:
        return self._of_object(value) is not None

    def runs_here(self, rref: RRefId, value: object) -> bool:
        """Whether the calling code runs in this value's actor."""
        running = running_actor.get()
        actor = None if running is None else self._actor(rref, value)
        return actor is not None and actor.rref == running

    def _actor(self, rref: RRefId, value: object) -> SerialActor | None:
        return self._of_object(value) or self._by_rref.get(rref)

    def _of_object(self, value: object) -> SerialActor | None:
        entry = self._by_object.get(id(value.__self__ if type(value) is MethodType else value))
        return None if entry is None else entry[1]


logger = logging.getLogger(__name__)

_REQUESTS: Final = ("reserve", "confirm", "admit", "release", "find", "give", "kept")
RESERVE, CONFIRM, ADMIT, RELEASE, FIND, GIVE, KEPT = (f"{__name__}:{request}" for request in _REQUESTS)

MAX_NAME_CHARS: Final = 1000
MAX_NAMES: Final = 1 << 15
"""Bounds the coordinator's memory, since a peer may reserve any number of names. A worker may have as many names as are
left for the others: one worker that makes all actors gets half of them, and no worker can take the last ones.
"""

MAX_NAMES_SENT: Final = 256  # with the error for an unknown name


@dataclass(slots=True, eq=False)
class _Claim:
    """A name's entry at the coordinator."""

    owner: Identity
    creator: Identity
    is_confirmed: bool = False


@dataclass(eq=False, repr=False)
class ActorNames:
    """Reserves and finds actor names. Handlers of peers' calls run on the user loop; other methods block, on any
    thread.

    Args:
        has_predecessor: whether this worker is a coordinator that replaced another one.
    """

    _me: Identity
    _directory: Directory
    _caller: Caller
    _has_predecessor: Callable[[], bool]
    _claims: dict[str, _Claim] = field(default_factory=dict)  # at the coordinator
    _num_claims: Counter[Identity] = field(default_factory=Counter)  # by creator
    _asked: set[Identity] = field(default_factory=set)  # workers that have reported their names
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _kept: dict[str, Awaitable[Any]] = field(default_factory=dict)  # at owners

    # ------------------------------------------------------------ requests of this worker

    def reserve(self, name: str, owner: int, timeout_s: float) -> None:
        """Reserves a name for an actor that is about to be created. Raises `ActorNameTaken`."""
        self._ask(RESERVE, (name, owner, self._me.id), timeout_s)

    def confirm(self, name: str, timeout_s: float) -> None:
        self._ask(CONFIRM, (name, self._me.id), timeout_s)

    def release(self, name: str, timeout_s: float) -> None:
        self._ask(RELEASE, (name, self._me.id), timeout_s)

    def find(self, name: str, timeout_s: float) -> Any:
        """Returns a reference to the actor. Raises `UnknownActor`."""
        deadline = Deadline.after(self._caller.timeout_of(timeout_s))
        owner = self._ask(FIND, (name,), timeout_s)
        return self._caller.gather(owner, GIVE, (name,), deadline.timeout_s())

    def _ask(self, what: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        return self._caller.gather(self._directory.coordinator, what, arguments, timeout_s)

    # ------------------------------------------------------------ handlers of peers' requests (user loop)

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        return {f"{__name__}:{request}": getattr(self, f"_on_{request}") for request in _REQUESTS}

    async def _on_reserve(self, name: str, owner: int, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        if not _is_name(name):
            raise CallRefused(f"the name of an actor must be a string of 1 to {MAX_NAME_CHARS} characters")
        member = self._directory.member
        who = member(creator).identity
        if not self._has_room_for(who):
            self._drop_ended()
        claim = await self._known_claim(name)
        if claim is not None:
            raise ActorNameTaken(
                f"worker {claim.owner.name!r} already has an actor named {name!r}; get a reference to it with "
                f"rpc.get_actor({name!r}), or choose another name"
            )
        if not self._has_room_for(who):
            raise Overloaded(
                f"worker {who.name!r} has created {self._num_claims[who]} of the {len(self._claims)} named actors of "
                f"this job, which has at most {MAX_NAMES}: one worker may have as many as are left for the others. "
                "Create others without name="
            )
        self._enter(name, _Claim(member(owner).identity, who))

    async def _on_admit(self, name: str, owner: int, creator: int) -> None:
        """Checks, for an owner, that a worker has reserved the name for an actor on that owner."""
        check_speaks_for(self._directory.name_of(owner))
        claim = self._claim(name)
        if claim is None or claim.is_confirmed or (claim.owner.id, claim.creator.id) != (owner, creator):
            raise CallRefused(
                f"worker {self._directory.name_of(creator)!r} has not reserved the name {name!r} for an actor on "
                f"worker {self._directory.name_of(owner)!r}"
            )

    async def _on_confirm(self, name: str, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        claim = self._claim(name)
        if claim is None or claim.creator.id != creator:
            raise UnknownActor(name)
        claim.is_confirmed = True

    async def _on_release(self, name: str, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        claim = self._claims.get(name)
        if claim is not None and not claim.is_confirmed and claim.creator.id == creator:
            self._remove(name)

    async def _on_find(self, name: str) -> int:
        claim = await self._known_claim(name)
        if claim is None or not claim.is_confirmed:
            self._drop_ended()
            raise UnknownActor(name, list(islice(self._claims, MAX_NAMES_SENT)))
        return claim.owner.id

    def _has_room_for(self, creator: Identity) -> bool:
        return self._num_claims[creator] < MAX_NAMES - len(self._claims)

    def _enter(self, name: str, claim: _Claim) -> None:
        self._claims[name] = claim
        self._num_claims[claim.creator] += 1

    def _remove(self, name: str) -> None:
        creator = self._claims.pop(name).creator
        self._num_claims[creator] -= 1
        if not self._num_claims[creator]:
            del self._num_claims[creator]  # counts of workers that come and go do not pile up

    def _claim(self, name: str) -> _Claim | None:
        """Returns the entry of a name, after deleting it if its worker has ended."""
        claim = self._claims.get(name)
        if claim is not None and self._has_ended(claim):
            self._remove(name)
            return None
        return claim

    async def _known_claim(self, name: str) -> _Claim | None:
        """Like `_claim`, but a coordinator that replaced another one first asks the workers about an unknown name."""
        if self._claim(name) is None and self._has_predecessor():
            async with self._asking:
                await self._ask_workers()
        return self._claim(name)

    async def _ask_workers(self) -> None:
        """Asks all workers for their names. Workers that do not answer are asked again at the next unknown name."""
        workers = [member.identity for member in self._directory.living() if member.identity != self._me]
        asked = [
            (worker, self._caller.start_gathering(worker.id, KEPT, (), ATTEMPT_LIMIT_S))
            for worker in workers
            if worker not in self._asked
        ]
        for worker, future in asked:
            try:
                names = await future
            except RpcdistError as exc:
                logger.warning("worker %r did not report its named actors: %s", worker.name, exc)
                continue
            self._asked.add(worker)
            self._take_names(worker, names)

    def _take_names(self, worker: Identity, names: object) -> None:
        """Records a worker's names, except those that another worker has claimed meanwhile."""
        if not isinstance(names, list):
            logger.warning("worker %r reported %s instead of a list of its named actors", worker.name, abridged(names))
            return
        for name in names:
            if _is_name(name) and self._claim(name) is None and self._has_room_for(worker):
                self._enter(name, _Claim(worker, worker, is_confirmed=True))

    def _has_ended(self, claim: _Claim) -> bool:
        lives = self._directory.lives
        return not lives(claim.owner) or not (claim.is_confirmed or lives(claim.creator))

    def _drop_ended(self) -> None:
        for name in [name for name, claim in self._claims.items() if self._has_ended(claim)]:
            self._remove(name)

    async def keep(self, name: str, rref: Awaitable[Any]) -> None:
        """Holds a new actor under its name, at the owner. Raises the error of its creation, or `CallRefused` if the
        calling worker has not reserved the name.
        """
        await rref
        caller = calling_worker.get()
        if caller is None:
            raise CallRefused("only a call from another worker can keep an actor under a name")
        asked = (name, self._me.id, caller.id)
        await self._caller.start_gathering(self._directory.coordinator, ADMIT, asked, UNSET_RPC_TIMEOUT)
        if len(self._kept) >= MAX_NAMES and name not in self._kept:
            raise Overloaded(
                f"this worker already has {MAX_NAMES} named actors, which is the limit; create others without name="
            )
        self._kept[name] = rref  # replaces one that was never confirmed, or whose claim ended with its coordinator

    async def _on_give(self, name: str) -> Awaitable[Any]:
        if name not in self._kept:
            raise UnknownActor(name, list(islice(self._kept, MAX_NAMES_SENT)))
        return self._kept[name]

    async def _on_kept(self) -> list[str]:
        """Lists the names kept here, for a new coordinator."""
        check_speaks_for(self._directory.name_of(self._directory.coordinator))
        return list(self._kept)


def _is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
