"""The actors of one owner, by the reference to their value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rpcdist.errors import RpcdistError
from rpcdist.ids import Identity
from rpcdist.rpc._actors.serial_actor import SerialActor
from rpcdist.rpc._actors.turn import Turn
from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._rref.identifiers import Incarnation, RRefId
from rpcdist.rpc._serving.active_call import ActiveCall

__all__ = ["ActorTable"]


class ActorTable:
    """One per agent; any thread may use it. An actor is made when its first call comes, and ends with its value.

    Args:
        submit: gives jobs to the pool.
        user_loop: runs coroutines.
    """

    def __init__(self, submit: Callable[..., None], user_loop: UserLoop) -> None:
        self.submit = submit
        self.user_loop = user_loop
        self._lock = threading.Lock()
        self._actors: dict[RRefId, SerialActor] = {}

    def __repr__(self) -> str:
        return f"<ActorTable [{len(self._actors)} actors]>"

    def __len__(self) -> int:
        return len(self._actors)

    def turn(
        self, call: ActiveCall, value: object, order: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Turn:
        """A call of a method of a value has come; it waits for its turn from `Turn.enter` on."""
        number = CallNumber.checked(order)
        assert call.value is not None  # the value is that of a reference
        rref, who = call.value.rref, call.session.peer
        caller = Incarnation(who.id, who.incarnation)
        return Turn(self._actor(rref), value, caller, number, method, args, kwargs)

    def over(self, rref: RRefId, who: Incarnation, stream: int, numbers: tuple[int, ...]) -> None:
        """Calls of a caller have ended for it, and may never come. Raises `RpcdistError` for what says nothing."""
        if type(stream) is not int or type(numbers) is not tuple or any(type(number) is not int for number in numbers):
            raise RpcdistError("calls of an actor are over by the number of their stream, and a tuple of their own")
        self._actor(rref).over(who, stream, numbers)

    def _actor(self, rref: RRefId) -> SerialActor:
        actor = self._actors.get(rref)
        if actor is None:
            with self._lock:
                actor = self._actors.setdefault(rref, SerialActor(rref, self))
        return actor

    def released(self, rref: RRefId) -> None:
        """Nobody refers to the value any more."""
        self._actors.pop(rref, None)

    def lost(self, identity: Identity) -> None:
        """A worker is declared dead; on the I/O loop."""
        with self._lock:
            actors = list(self._actors.values())
        if actors:
            self.submit(_gone, actors, Incarnation(identity.id, identity.incarnation))


def _gone(actors: list[SerialActor], who: Incarnation) -> None:
    for actor in actors:
        actor.gone(who)
