"""The actors of one owner: by their objects, and by the references that made them."""

from __future__ import annotations

import threading
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from rpcdist.ids import Identity
from rpcdist.inspection import ActorFacts
from rpcdist.rpc._actors.serial_actor import SerialActor, Turn, running_actor
from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._executors.lane import Lane
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._rref.messages import Incarnation, RRefId
from rpcdist.rpc._rref.proxied import CHECKPOINTED_METHOD

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
            self._pool.submit(_gone, actors, Incarnation(identity.id, identity.incarnation))

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
        return Turn(actor, value, (Incarnation(who.id, who.incarnation), rref), number, method, args, kwargs)

    def over(self, rref: RRefId, value: object, who: Incarnation, stream: int, numbers: tuple[int, ...]) -> None:
        """Calls of a caller have ended for it, and may never come."""
        actor = self._actor(rref, value)
        if actor is not None:
            actor.over((who, rref), stream, numbers)

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


def _gone(actors: list[SerialActor], who: Incarnation) -> None:
    for actor in actors:
        actor.gone(who)
