"""The actors of one owner: by their objects, by the references that made them, and by their names.

The coordinator knows which worker has which name, and that worker holds a reference under it. So a name is unique in
the job, an actor that has one lives as long as its worker, and a name is free again when the worker of its actor has
ended. While the actor is created, the name is reserved, until its creator ends.

A coordinator that took the place of another one knows of no names. It asks each worker once which it keeps, when it is
asked for a name that it does not know.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
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
from rpcdist.time_limits import ATTEMPT_LIMIT_S, MIN_WAIT_S

_SHARED_KINDS: Final = (
    type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, type, ModuleType, FunctionType,
    BuiltinFunctionType,
)  # fmt: skip
"""Objects of these may be one for all that use them, and have no state that calls could confuse."""


class ActorTable:
    """One per agent; any thread may use it.

    An actor begins with its creation and ends with the last reference that a `remote(serial=True)` made. Any
    reference to its object (made or returned by one of its methods, or another worker's copy) leads to the actor.
    """

    def __init__(self, pool: ThreadPool, user_loop: UserLoop) -> None:
        self._pool = pool
        self._user_loop = user_loop
        self._lock = threading.Lock()  # around changes of the two below
        self._by_rref: dict[RRefId, SerialActor] = {}
        self._by_object: dict[int, tuple[object, SerialActor]] = {}  # by `id`; the object lives as long as its entry
        # By a reference other than its first: the actor, and the processes that have called through it.
        self._called_by: dict[RRefId, tuple[SerialActor, set[ProcessId]]] = {}

    def __len__(self) -> int:
        return len(self._by_rref)

    def facts(self, now: float, most: int) -> list[ActorFacts]:
        """The actors; any thread, without a lock."""
        actors = dict.fromkeys(list(islice(self._by_rref.values(), most)))
        return [actor.facts(now) for actor in actors]

    # ------------------------------------------------------------ the life of an actor

    def begin(self, rref: RRefId) -> Lane:
        """The creation of an actor has come; returns where it runs."""
        actor = SerialActor(rref, self._pool, self._user_loop)
        with self._lock:
            self._by_rref[rref] = actor
        return actor.lane

    def born(self, rref: RRefId, value: Any) -> None:
        """The object of an actor exists. It may be that of another one, and is the same actor then."""
        if isinstance(value, _SHARED_KINDS):
            return
        with self._lock:
            actor = self._by_rref.get(rref)
            if actor is None:
                return
            _, first = self._by_object.setdefault(id(value), (value, actor))
            if first is actor:
                # A method of an actor that is made again has another `self` than the object that a reference names.
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
        """Nobody refers to the value any more. The object of an actor ends on its thread, where it was made."""
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
        """RPC ends here: the threads of the actors go."""
        with self._lock:
            actors = set(self._by_rref.values())
            ends = [(actor.lane, [self._by_object.pop(one, None) for one in actor.object_ids]) for actor in actors]
        for lane, held in ends:
            lane.close(held.clear)  # not under the lock: it may run code of users

    def lost(self, identity: Identity) -> None:
        """A worker is declared dead; on the I/O loop."""
        with self._lock:
            actors = list(self._by_rref.values())
        if actors:
            self._pool.submit(_gone, actors, identity.process)

    # ------------------------------------------------------------ calls

    def free_lane(self, rref: RRefId) -> Lane | None:
        """The thread of an actor, if a call that has come can run there at once."""
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
        """A call of a method of a value has come; it waits for its turn from `Turn.enter` on.

        Args:
            order: the number that the caller gave it; None if it did not know of an actor.

        Returns:
            None if the value is no actor.
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
        """Calls of a caller have ended for it, and may never come."""
        actor = self._actor(rref, value)
        if actor is not None:
            self._note_caller(actor, rref, who)
            actor.over((who, rref), stream, numbers)

    def _note_caller(self, actor: SerialActor, rref: RRefId, who: ProcessId) -> None:
        """The actor keeps the order of this caller's calls until nobody has the reference."""
        if rref != actor.rref:
            self._called_by.setdefault(rref, (actor, set()))[1].add(who)

    def is_actor(self, value: object) -> bool:
        """Whether a value is the object of an actor, or a method of it."""
        return self._of_object(value) is not None

    def runs_here(self, rref: RRefId, value: object) -> bool:
        """Whether this is code of the actor that a value is."""
        running = running_actor.get()
        actor = None if running is None else self._actor(rref, value)
        return actor is not None and actor.rref == running

    def _actor(self, rref: RRefId, value: object) -> SerialActor | None:
        return self._of_object(value) or self._by_rref.get(rref)

    def _of_object(self, value: object) -> SerialActor | None:
        """The actor that an object, or a method of it, belongs to."""
        entry = self._by_object.get(id(value.__self__ if type(value) is MethodType else value))
        return None if entry is None else entry[1]


def _gone(actors: list[SerialActor], who: ProcessId) -> None:
    for actor in actors:
        actor.gone(who)


logger = logging.getLogger(__name__)

RESERVE: Final = "rpcdist.rpc._actors.actor_names:reserve"
CONFIRM: Final = "rpcdist.rpc._actors.actor_names:confirm"
ADMIT: Final = "rpcdist.rpc._actors.actor_names:admit"
RELEASE: Final = "rpcdist.rpc._actors.actor_names:release"
FIND: Final = "rpcdist.rpc._actors.actor_names:find"
GIVE: Final = "rpcdist.rpc._actors.actor_names:give"
KEPT: Final = "rpcdist.rpc._actors.actor_names:kept"

MAX_NAME_CHARS: Final = 1000
MAX_NAMES: Final = 1 << 14
"""So many names the coordinator keeps at once; a peer may ask for any number."""

MAX_NAMES_TOLD: Final = 256  # to a worker that asks for another name, for the text of its error


@dataclass(slots=True, eq=False)
class _Claim:
    """The owner of a name, at the coordinator."""

    owner: Identity
    creator: Identity
    is_confirmed: bool = False


class ActorNames:
    """One per agent. Functions for other workers run on the user loop; the other methods block, on any thread.

    Args:
        has_predecessor: whether this worker is a coordinator that took the place of another one.
    """

    def __init__(self, me: Identity, directory: Directory, caller: Caller, has_predecessor: Callable[[], bool]) -> None:
        self._me = me
        self._directory = directory
        self._caller = caller
        self._claims: dict[str, _Claim] = {}  # at the coordinator
        self._has_predecessor = has_predecessor
        self._asked: set[Identity] = set()  # which names they keep
        self._asking = asyncio.Lock()
        self._kept: dict[str, Awaitable[Any]] = {}  # at owners

    # ------------------------------------------------------------ what this worker asks

    def reserve(self, name: str, owner: int, timeout_s: float) -> None:
        """Takes a name for an actor that is about to be created. Raises `ActorNameTaken`."""
        self._ask(RESERVE, (name, owner, self._me.id), timeout_s)

    def confirm(self, name: str, timeout_s: float) -> None:
        """The actor exists under the name."""
        self._ask(CONFIRM, (name, self._me.id), timeout_s)

    def release(self, name: str, timeout_s: float) -> None:
        """The actor was not created."""
        self._ask(RELEASE, (name, self._me.id), timeout_s)

    def find(self, name: str, timeout_s: float) -> Any:
        """A reference to the actor. Raises `UnknownActor`."""
        deadline = Deadline.after(self._caller.timeout_of(timeout_s))
        owner = self._ask(FIND, (name,), timeout_s)
        left_s = max(MIN_WAIT_S, deadline.remaining_s()) if deadline.is_finite else 0.0
        return self._caller.gather(owner, GIVE, (name,), left_s)

    def _ask(self, what: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        return self._caller.gather(self._directory.coordinator, what, arguments, timeout_s)

    # ------------------------------------------------------------ what others ask (user loop)

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        """The functions that every peer may call, by the name on the wire."""
        return {
            RESERVE: self._on_reserve,
            ADMIT: self._on_admit,
            CONFIRM: self._on_confirm,
            RELEASE: self._on_release,
            FIND: self._on_find,
            GIVE: self._on_give,
            KEPT: self._on_kept,
        }

    async def _on_reserve(self, name: str, owner: int, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        if not _is_name(name):
            raise CallRefused(f"the name of an actor must be a string of 1 to {MAX_NAME_CHARS} characters")
        if len(self._claims) >= MAX_NAMES:
            self._drop_ended()
        claim = await self._known_claim(name)
        if claim is not None:
            raise ActorNameTaken(
                f"the name {name!r} is that of an actor on worker {claim.owner.name!r}; rpc.get_actor({name!r}) gives "
                "a reference to it, and another name makes another actor"
            )
        if len(self._claims) >= MAX_NAMES:
            raise Overloaded(
                f"{MAX_NAMES} actors of the job have names already, which is the limit; create others without name="
            )
        member = self._directory.member
        self._claims[name] = _Claim(member(owner).identity, member(creator).identity)

    async def _on_admit(self, name: str, owner: int, creator: int) -> None:
        """An owner asks whether a worker has reserved a name for an actor there."""
        check_speaks_for(self._directory.name_of(owner))
        claim = self._claim(name)
        if claim is None or claim.is_confirmed or (claim.owner.id, claim.creator.id) != (owner, creator):
            raise CallRefused(
                f"{self._directory.name_of(creator)!r} has not reserved the name {name!r} for an actor there"
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
            del self._claims[name]

    async def _on_find(self, name: str) -> int:
        claim = await self._known_claim(name)
        if claim is None or not claim.is_confirmed:
            self._drop_ended()
            raise UnknownActor(name, list(islice(self._claims, MAX_NAMES_TOLD)))
        return claim.owner.id

    def _claim(self, name: str) -> _Claim | None:
        """The owner of a name; a worker that is gone loses it."""
        claim = self._claims.get(name)
        if claim is not None and self._has_ended(claim):
            del self._claims[name]
            return None
        return claim

    async def _known_claim(self, name: str) -> _Claim | None:
        """As `_claim`; asks the workers first that were there before this coordinator, if it does not know the name."""
        if self._claim(name) is None and self._has_predecessor():
            async with self._asking:
                await self._ask_workers()
        return self._claim(name)

    async def _ask_workers(self) -> None:
        """Asks all workers for their names. One that cannot answer now is asked again at the next unknown name."""
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
                logger.warning("worker %r did not report its actors: %s", worker.name, exc)
                continue
            self._asked.add(worker)
            self._take_names(worker, names)

    def _take_names(self, worker: Identity, names: object) -> None:
        """Takes the names that a worker answered, except those that another worker has got meanwhile."""
        if not isinstance(names, list):
            logger.warning("worker %r did not report its actors, but %s", worker.name, abridged(names))
            return
        for name in names:
            if _is_name(name) and self._claim(name) is None and len(self._claims) < MAX_NAMES:
                claim = self._claims[name] = _Claim(worker, worker)
                claim.is_confirmed = True

    def _has_ended(self, claim: _Claim) -> bool:
        return not self._lives(claim.owner) or not (claim.is_confirmed or self._lives(claim.creator))

    def _lives(self, worker: Identity) -> bool:
        directory = self._directory
        return directory.is_living(worker.id) and directory.member(worker.id).identity == worker

    def _drop_ended(self) -> None:
        self._claims = {name: claim for name, claim in self._claims.items() if not self._has_ended(claim)}

    async def keep(self, name: str, rref: Awaitable[Any]) -> None:
        """At the owner: holds the actor under its name, as soon as it exists. Raises what its creation raised, and
        `CallRefused` unless the worker that asks for it has reserved the name.
        """
        await rref
        caller = calling_worker.get()
        if caller is None:
            raise CallRefused("an actor is kept under a name for the worker that calls for it")
        asked = (name, self._me.id, caller.id)
        await self._caller.start_gathering(self._directory.coordinator, ADMIT, asked, UNSET_RPC_TIMEOUT)
        if len(self._kept) >= MAX_NAMES and name not in self._kept:
            raise Overloaded(
                f"{MAX_NAMES} actors of this worker have names already, which is the limit; create others without name="
            )
        self._kept[name] = rref  # one that is here already was never confirmed, or its claim ended with its coordinator

    async def _on_give(self, name: str) -> Awaitable[Any]:
        if name not in self._kept:
            raise UnknownActor(name, list(islice(self._kept, MAX_NAMES_TOLD)))
        return self._kept[name]

    async def _on_kept(self) -> list[str]:
        """The names of the actors here, for a coordinator that has just begun."""
        check_speaks_for(self._directory.name_of(self._directory.coordinator))
        return list(self._kept)


def _is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
