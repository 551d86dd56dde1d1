"""Calls of the methods of an actor, in the order in which they are made here.

A call gets its number before it is encoded and sent. Either step may fail, and a sent call may be lost with its
connection; the owner must not wait for such a number. As soon as no earlier call is open, later calls tell it so (their
*floor*). Calls that are open already need a message, which is repeated until it has arrived or the owner is lost.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._calling.retries import Retries
from rpcdist.rpc._futures.waiting import note_started
from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.messages import RRefId
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
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


class SerialCalls:
    """One per agent; any thread may use it."""

    def __init__(self, rrefs: RRefShell, caller: Caller, retries: Retries) -> None:
        self._rrefs = rrefs
        self._caller = caller
        self._retries = retries
        self._lock = threading.Lock()
        self._streams = itertools.count()
        self._orders: weakref.WeakValueDictionary[RRefId, CallOrder] = weakref.WeakValueDictionary()

    def order_of(self, rref: RRefId) -> CallOrder:
        """Of an actor's calls. All references to the actor share it, as long as any of them, or a call, lives."""
        with self._lock:
            order = self._orders.get(rref)
            if order is None:
                order = self._orders[rref] = CallOrder(next(self._streams))
            return order

    def call(
        self,
        rref: Any,
        mode: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        remote: Callable[..., Any],
    ) -> Any:
        """Calls a method in its turn.

        Args:
            rref: the reference; kept until the call has ended.
            mode: see `rpcdist.rpc._rref.proxied.Mode`.
            timeout_s: limit of the call, the wait for its turn included.
            remote: for the mode of that name.
        """
        state = self._rrefs.check_sharable(rref)
        owner = self._rrefs.owner_of(state)
        order: CallOrder = rref._order or self.order_of(state.rref)
        rref._order = order
        number = order.begin()
        arguments: tuple[Any, ...] = (tuple(number), method, args, kwargs)
        on: Handle | None = rref._handle if state.id != state.rref else None
        if on is None:  # made here from a value: the tables of references need not list it, so a call cannot name it
            arguments = (rref, *arguments)
        end = partial(self._end, order, number.number, owner, rref)
        try:
            if mode == "rpc_sync":
                result = self._caller.sync(owner, proxied._invoke_in_turn, arguments, None, timeout_s, on)
                end(None)
                return result
            if mode == "remote":
                result = remote(owner, proxied._invoke_in_turn, arguments, timeout_s, None, on)
                future = result._get_future()
            else:
                result = future = self._caller.start(owner, proxied._invoke_in_turn, arguments, None, timeout_s, on)
                note_started(future)
        except BaseException as exc:
            end(exc)
            raise
        future._observe(lambda: end(future._error))
        return result

    def _end(self, order: CallOrder, number: int, owner: int, rref: Any, error: BaseException | None) -> None:
        order.end(number, error is None, partial(self._tell_over, owner, rref))

    def _tell_over(self, owner: int, rref: Any, stream: int, numbers: tuple[int, ...]) -> Future[Any]:
        return self._retries.start(owner, proxied._turns_over, (rref, stream, numbers), None, UNSET_RPC_TIMEOUT)
