"""The caller's side of actors: numbers its calls of each, and says which will not come.

A number is given before the call is encoded and sent, and either may fail; a call that was sent may be lost with its
connection. The owner must not wait for such a number. As soon as no earlier call is open, later calls tell it so (their
*floor*); for those that are open already, a message does, which is repeated until it has arrived or the owner is lost.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._rref.identifiers import RRefId
from rpcdist.rpc.future import Future

TellOver = Callable[[int, tuple[int, ...]], Future[Any]]
"""Tells the owner that calls (stream, numbers) are over."""


class CallOrder:
    """The numbers of one process's calls of one actor. Any thread may use it.

    Args:
        stream: of these numbers; higher than that of an earlier `CallOrder` of the same actor.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # around the rest; never held while something is sent
        self._next = 0
        self._open: dict[int, None] = {}
        self._over: list[int] = []  # not told yet
        self._is_telling = False

    def __repr__(self) -> str:
        return f"<CallOrder {self._stream}: {self._next} calls, {len(self._open)} open>"

    def begin(self) -> CallNumber:
        """Numbers a call; `end` must follow."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = None
            return CallNumber(self._stream, number, next(iter(self._open)))

    def end(self, number: int, is_answered: bool, tell: TellOver) -> None:
        """A call has ended.

        Args:
            number: of the call.
            is_answered: the owner has certainly seen it: it gave a result.
            tell: how to tell the owner; called if it might wait for this number.
        """
        with self._lock:
            del self._open[number]
            if not self._open:
                self._over.clear()  # the floor of the next call says it
            elif not is_answered:
                self._over.append(number)
            if not self._over or self._is_telling:
                return
            self._is_telling = True
        self._tell(tell)

    def _tell(self, tell: TellOver) -> None:
        with self._lock:
            if not self._over:
                self._is_telling = False
                return
            numbers, self._over = tuple(self._over), []
        try:
            told = tell(self._stream, numbers)
        except Exception:  # the owner is lost, or RPC ends here: the calls that are open fail by that
            with self._lock:
                self._is_telling = False
            return
        told.is_quiet = True
        told._when_done(lambda _: self._tell(tell))


class CallOrders:
    """The orders of one process, by actor. All references to an actor share one, as long as any of them, or a call,
    lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams = itertools.count()
        self._orders: weakref.WeakValueDictionary[RRefId, CallOrder] = weakref.WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<CallOrders [{len(self._orders)} actors]>"

    def of(self, rref: RRefId) -> CallOrder:
        with self._lock:
            order = self._orders.get(rref)
            if order is None:
                order = self._orders[rref] = CallOrder(next(self._streams))
            return order
