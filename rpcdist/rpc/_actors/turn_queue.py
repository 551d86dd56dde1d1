"""The order of calls at one actor. Pure: no clock, no threads, no sockets.

A caller numbers its calls of an actor from 0. Such a *stream* of numbers ends when the caller drops its last reference
to the actor; later streams have higher stream numbers. Calls may arrive in any order. A call is ready when every
earlier call of its stream has arrived or will never arrive. The latter is known if the call is below the *floor* in a
later call (all calls below it have ended at the caller), or if the caller reports that it is *over*.

Callers take turns, so a caller that floods an actor delays each call of another caller by at most one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

from rpcdist.errors import Overloaded, RpcdistError, abridged

C = TypeVar("C", bound=Hashable)
T = TypeVar("T")

MAX_WAITING: Final = 1 << 16
"""How many calls of one caller may wait at one actor. This bounds the owner's memory; further calls are refused."""


class CallNumber(NamedTuple):
    """A caller's number for one of its calls.

    Attributes:
        stream: the caller's stream of numbers for this actor.
        number: the call's number in the stream, from 0.
        floor: every call with a lower number has ended at the caller.
    """

    stream: int
    number: int
    floor: int

    @classmethod
    def checked(cls, parts: object) -> CallNumber:
        if type(parts) is tuple and len(parts) == 3:
            stream, number, floor = parts
            if type(stream) is int and type(number) is int and type(floor) is int:
                if stream >= 0 and 0 <= floor <= number:
                    return cls(stream, number, floor)
        raise RpcdistError(f"the order of a call to an actor must be (stream, number, floor), not {abridged(parts)}")


class _CallerQueue(Generic[T]):
    """One caller's calls: `next` is the lowest missing number; `early` has the calls that arrived before it."""

    __slots__ = ("early", "is_listed", "next", "numbers", "over", "ready", "stream")

    def __init__(self, stream: int, first: int) -> None:
        self.stream = stream
        self.next = first
        self.early: dict[int, T] = {}
        self.numbers: list[int] = []  # those in `early`, as a heap: scanning them at each call would be slow
        self.over: set[int] = set()
        self.ready: deque[T] = deque()
        self.is_listed = False  # in the list of callers with ready calls

    def advance(self) -> None:
        while True:
            if self.next in self.early:
                self.ready.append(self.early.pop(heappop(self.numbers)))
            elif self.next not in self.over:
                return
            self.over.discard(self.next)  # also for `early`: the call may have arrived after it was over
            self.next += 1

    def raise_floor(self, floor: int) -> None:
        """Stops waiting for numbers below `floor`; arrived calls below it become ready first."""
        if floor > self.next:
            while self.numbers and self.numbers[0] < floor:
                self.ready.append(self.early.pop(heappop(self.numbers)))
            if len(self.over) < floor - self.next:
                self.over = {number for number in self.over if number >= floor}
            else:
                self.over.difference_update(range(self.next, floor))
            self.next = floor
        self.advance()

    def begin_stream(self, stream: int, first: int) -> None:
        self.raise_floor(max(self.early, default=-1) + 1)
        self.stream, self.next = stream, first
        self.over.clear()


class TurnQueue(Generic[C, T]):
    """The waiting calls of one actor, by caller. Not thread-safe."""

    def __init__(self) -> None:
        self._callers: dict[C, _CallerQueue[T]] = {}
        self._ready: deque[_CallerQueue[T]] = deque()

    def __len__(self) -> int:
        return sum(len(caller.ready) for caller in list(self._ready))

    @property
    def has_ready(self) -> bool:
        """Whether a call is ready; any thread may ask."""
        return bool(self._ready)

    @property
    def callers(self) -> list[C]:
        """The callers so far, except those that are gone."""
        return list(self._callers)

    def arrive(self, who: C, number: CallNumber, turn: T) -> None:
        """Queues an arrived call. If its caller has too many here, counts it as over and raises `Overloaded`."""
        caller = self._caller(who, number.stream, number.floor)
        if len(caller.ready) + len(caller.early) >= MAX_WAITING:
            self.over(who, number.stream, (number.number,))
            raise Overloaded(
                f"{MAX_WAITING} calls of this caller already wait at the actor; wait for results before you make more"
            )
        if number.stream < caller.stream or number.number < caller.next or number.number in caller.early:
            caller.ready.append(turn)  # it has ended at the caller, so its order does not matter
        else:
            caller.early[number.number] = turn
            heappush(caller.numbers, number.number)
            caller.raise_floor(number.floor)
        self._list(caller)

    def join(self, who: C, turn: T) -> None:
        """Queues an arrived call without a number, which is ready at once."""
        caller = self._caller(who, 0, 0)
        caller.ready.append(turn)
        self._list(caller)

    def pass_by(self, who: C, number: CallNumber) -> bool:
        """A faster `arrive` and `take` if the call is its caller's next and no other waits; otherwise False."""
        caller = self._callers.get(who)
        if caller is None or self._ready or number.number != caller.next or number.stream != caller.stream:
            return False
        if caller.early or caller.over:
            return False
        caller.next += 1
        return True

    def over(self, who: C, stream: int, numbers: Iterable[int]) -> None:
        """Records that these calls have ended at the caller, perhaps an unknown one, and may never arrive."""
        caller = self._caller(who, stream, 0)
        if stream < caller.stream:
            return
        caller.over.update(number for number in numbers if caller.next <= number < caller.next + MAX_WAITING)
        caller.advance()
        self._list(caller)

    def gone(self, who: C) -> None:
        """Removes a dead caller: its arrived calls are ready, since no other of its calls will arrive."""
        caller = self._callers.pop(who, None)
        if caller is not None:
            caller.raise_floor(max(caller.early, default=-1) + 1)
            self._list(caller)

    def take(self) -> T | None:
        """Removes and returns the next call; None if none is ready."""
        if not self._ready:
            return None
        caller = self._ready.popleft()
        turn = caller.ready.popleft()
        caller.is_listed = False
        self._list(caller)
        return turn

    def _caller(self, who: C, stream: int, floor: int) -> _CallerQueue[T]:
        caller = self._callers.get(who)
        if caller is None:
            caller = self._callers[who] = _CallerQueue(stream, floor)
        if stream > caller.stream:
            caller.begin_stream(stream, floor)
        return caller

    def _list(self, caller: _CallerQueue[T]) -> None:
        if caller.ready and not caller.is_listed:
            caller.is_listed = True
            self._ready.append(caller)
