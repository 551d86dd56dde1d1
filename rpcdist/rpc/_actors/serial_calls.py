"""Calls of an actor's methods, numbered in the order in which this worker makes them.

A call gets its number before it is encoded and sent. Either step may fail, and a sent call may be lost with its
connection; the owner must not wait for such a number. Once no earlier call is open, the *floor* of later calls tells
the owner. If later calls are already open, a message does, which is retried until it arrives or the owner is lost.
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

ReportEnded = Callable[[int, tuple[int, ...]], Future[Any]]
"""Sends the owner the (stream, numbers) of ended calls."""


class CallOrder:
    """Numbers this process's calls of one actor; thread-safe.

    Args:
        stream: the id of this sequence of numbers; higher than that of any earlier `CallOrder` for the same actor.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # guards the rest; never held while sending
        self._next = 0
        self._open: dict[int, None] = {}
        self._over: list[int] = []  # not reported yet
        self._is_reporting = False

    def begin(self) -> CallNumber:
        """Numbers a call; `end` must follow."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = None
            return CallNumber(self._stream, number, next(iter(self._open)))

    def end(self, number: int, is_answered: bool, report: ReportEnded) -> None:
        """Records that a call has ended.

        Args:
            is_answered: whether the owner has returned a result, and so has certainly seen the call.
            report: called if the owner might still wait for this number.
        """
        with self._lock:
            del self._open[number]
            if not self._open:
                self._over.clear()  # the floor of the next call reports them
            elif not is_answered:
                self._over.append(number)
            if not self._over or self._is_reporting:
                return
            self._is_reporting = True
        self._report(report)

    def _report(self, report: ReportEnded) -> None:
        with self._lock:
            if not self._over:
                self._is_reporting = False
                return
            numbers, self._over = tuple(self._over), []
        try:
            sent = report(self._stream, numbers)
        except Exception:  # the owner is lost, or RPC shuts down: then the open calls fail anyway
            with self._lock:
                self._is_reporting = False
            return
        sent.is_quiet = True
        sent._when_done(lambda _: self._report(report))


class SerialCalls:
    """Makes this worker's calls of actors' methods; thread-safe."""

    def __init__(self, rrefs: RRefShell, caller: Caller, retries: Retries) -> None:
        self._rrefs = rrefs
        self._caller = caller
        self._retries = retries
        self._lock = threading.Lock()
        self._streams = itertools.count()
        self._orders: weakref.WeakValueDictionary[RRefId, CallOrder] = weakref.WeakValueDictionary()

    def order_of(self, rref: RRefId) -> CallOrder:
        """Returns the actor's `CallOrder`, which all references to the actor share and, with open calls, keep alive."""
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
            rref: the reference; kept alive until the call has ended.
            mode: see `rpcdist.rpc._rref.proxied.Mode`.
            timeout_s: limit for the call, including the wait for its turn.
            remote: makes the call in mode "remote".
        """
        state = self._rrefs.check_sharable(rref)
        owner = self._rrefs.owner_of(state)
        order: CallOrder = rref._order or self.order_of(state.rref)
        rref._order = order
        number = order.begin()
        arguments: tuple[Any, ...] = (tuple(number), method, args, kwargs)
        on: Handle | None = rref._handle if state.id != state.rref else None
        if on is None:  # made here from a value: it may not be in the reference tables, so send it as an argument
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
