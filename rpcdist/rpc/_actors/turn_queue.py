"""The order of calls at one actor. Pure: no clock, no threads, no sockets.

A caller numbers its calls of one actor from 0; a *stream* of numbers ends when the caller holds no reference to the
actor any more, and a later one has a higher number itself. Calls arrive in any order. One is ready when every earlier
call of its stream has arrived, or will never come: because it is below the *floor* that a later call brings along (the
caller has seen the end of all below it), or because the caller says that it is *over*.

Callers take turns: one that floods an actor delays the calls of another by one call at a time.
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
"""So many calls of one caller may wait at one actor, since they hold memory of the owner; further ones are refused."""


class CallNumber(NamedTuple):
    """Which call of its caller one is.

    Attributes:
        stream: of the caller's numbers for this actor.
        number: of the call, from 0.
        floor: every call with a lower number has ended for the caller.
    """

    stream: int
    number: int
    floor: int

    @classmethod
    def checked(cls, parts: object) -> CallNumber:
        """A number from a peer; raises `RpcdistError` if it is none."""
        if type(parts) is tuple and len(parts) == 3:
            stream, number, floor = parts
            if type(stream) is int and type(number) is int and type(floor) is int:
                if stream >= 0 and 0 <= floor <= number:
                    return cls(stream, number, floor)
        raise RpcdistError(f"the order of a call to an actor is three numbers, but not {abridged(parts)}")


class _CallerQueue(Generic[T]):
    """One caller: `next` is the lowest number that is waited for, `early` has what arrived before its turn."""

    __slots__ = ("early", "is_listed", "next", "numbers", "over", "ready", "stream")

    def __init__(self, stream: int, first: int) -> None:
        self.stream = stream
        self.next = first
        self.early: dict[int, T] = {}
        self.numbers: list[int] = []  # of `early`, as a heap: a look at all for each call would take long
        self.over: set[int] = set()
        self.ready: deque[T] = deque()
        self.is_listed = False  # among those that have calls which are ready

    def advance(self) -> None:
        while True:
            if self.next in self.early:
                self.ready.append(self.early.pop(heappop(self.numbers)))
            elif self.next not in self.over:
                return
            self.over.discard(self.next)  # a call may come that its caller had given up
            self.next += 1

    def raise_floor(self, floor: int) -> None:
        """The queue does not wait for numbers below; calls of those numbers that have arrived go first."""
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
    """The calls that wait at one actor, by caller. Not thread-safe."""

    def __init__(self) -> None:
        self._callers: dict[C, _CallerQueue[T]] = {}
        self._ready: deque[_CallerQueue[T]] = deque()

    def __len__(self) -> int:
        """How many calls are ready."""
        return sum(len(caller.ready) for caller in list(self._ready))

    @property
    def has_ready(self) -> bool:
        """Whether a call is ready; any thread may ask."""
        return bool(self._ready)

    @property
    def callers(self) -> list[C]:
        """Those that have called, and are not gone."""
        return list(self._callers)

    def __repr__(self) -> str:
        early = sum(len(caller.early) for caller in self._callers.values())
        return f"<TurnQueue {len(self)} ready, {early} early, of {len(self._callers)} callers>"

    def arrive(self, who: C, number: CallNumber, turn: T) -> None:
        """A call has come. Raises `Overloaded` if its caller has too many here; the call counts as over then."""
        caller = self._caller(who, number.stream, number.floor)
        if len(caller.ready) + len(caller.early) >= MAX_WAITING:
            self.over(who, number.stream, (number.number,))
            raise Overloaded(
                f"{MAX_WAITING} calls of one caller wait at this actor already; wait for results before you make more"
            )
        if number.stream < caller.stream or number.number < caller.next or number.number in caller.early:
            caller.ready.append(turn)  # the caller has given it up, so nobody can tell the order
        else:
            caller.early[number.number] = turn
            heappush(caller.numbers, number.number)
            caller.raise_floor(number.floor)
        self._list(caller)

    def join(self, who: C, turn: T) -> None:
        """A call without a number has come: it is ready."""
        caller = self._caller(who, 0, 0)
        caller.ready.append(turn)
        self._list(caller)

    def pass_by(self, who: C, number: CallNumber) -> bool:
        """Whether a call that has come need not queue up, as it is the next of its caller and nobody waits; the same as
        `arrive` and `take`, in less time.
        """
        caller = self._callers.get(who)
        if caller is None or self._ready or number.number != caller.next or number.stream != caller.stream:
            return False
        if caller.early or caller.over:
            return False
        caller.next += 1
        return True

    def over(self, who: C, stream: int, numbers: Iterable[int]) -> None:
        """These calls have ended for their caller, and may never come. The caller may be unknown until now."""
        caller = self._caller(who, stream, 0)
        if stream < caller.stream:
            return
        caller.over.update(number for number in numbers if caller.next <= number < caller.next + MAX_WAITING)
        caller.advance()
        self._list(caller)

    def gone(self, who: C) -> None:
        """The caller is dead: no more calls of it come, and those that have come wait for no others."""
        caller = self._callers.pop(who, None)
        if caller is not None:
            caller.raise_floor(max(caller.early, default=-1) + 1)
            self._list(caller)

    def take(self) -> T | None:
        """The call whose turn it is; None if none is ready."""
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
