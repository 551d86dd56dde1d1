"""Calls of the methods of an actor, from anywhere: in the order in which they are made here."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from rpcdist.rpc._actors.call_order import CallOrder, CallOrders
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._calling.retries import Retries
from rpcdist.rpc._futures.collected import note_started
from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.manager import RRefManager
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future


class MakeRemote(Protocol):
    """Makes a call whose result stays at the owner (`RRefCalls.remote`)."""

    def __call__(
        self, to: int, func: Any, args: tuple[Any, ...], timeout_s: float, kwargs: None, on: Handle | None
    ) -> Any: ...


class SerialCalls:
    """One per agent; any thread may use it.

    Args:
        rrefs: knows the references.
        caller: makes the calls.
        retries: repeats the message that a call is over.
    """

    def __init__(self, rrefs: RRefManager, caller: Caller, retries: Retries) -> None:
        self._rrefs = rrefs
        self._caller = caller
        self._retries = retries
        self._orders = CallOrders()

    def __repr__(self) -> str:
        return f"<SerialCalls {self._orders!r}>"

    def call(
        self,
        rref: Any,
        mode: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        remote: MakeRemote,
    ) -> Any:
        """Calls a method in its turn.

        Args:
            rref: the reference; kept until the call has ended.
            mode: see `rpcdist.rpc._rref.proxy.Mode`.
            method, args, kwargs: what to call.
            timeout_s: limit of the call, the wait for its turn included.
            remote: for the mode of that name.
        """
        state = self._rrefs.check_sharable(rref)
        owner = self._rrefs.owner_of(state)
        order: CallOrder = rref._order or self._orders.of(state.rref)
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
