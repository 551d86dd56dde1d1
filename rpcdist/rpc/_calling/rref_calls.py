"""The calls that remote references make: to create a value on another worker, to fetch it, and to call its methods."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

from rpcdist._proto import value_pb2
from rpcdist.errors import CallRefused, RpcdistError, RRefError
from rpcdist.profile_ranges import profile, profiling_key
from rpcdist.rpc._actors.actor_names import ActorTable
from rpcdist.rpc._actors.serial_actor import running_actor
from rpcdist.rpc._actors.serial_calls import CallOrder
from rpcdist.rpc._autograd_hooks import AutogradHooks
from rpcdist.rpc._calling.caller import Caller, Destination
from rpcdist.rpc._calling.creations import NOT_INCLUDED, Creation
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._calling.retries import Retries
from rpcdist.rpc._futures.waiting import note_started
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import AnySession, Lifetime, calling_worker
from rpcdist.rpc._peers.router import Router
from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.handles import Handle, HandleState
from rpcdist.rpc._rref.messages import ReferenceShare, RRefId
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.transport.fork import check_not_forked


@dataclass(eq=False, repr=False)
class RRefCalls:
    """Makes the calls of an agent's references, all of which hold this object. Any thread may call any method."""

    _rrefs: RRefShell
    _caller: Caller
    _retries: Retries
    _actors: ActorTable
    _directory: Directory
    _autograd: AutogradHooks
    _autograd_mode: str
    _lifetime: Lifetime
    _router: Router
    _streams: itertools.count[int] = field(default_factory=itertools.count)
    _orders: weakref.WeakValueDictionary[RRefId, CallOrder] = field(default_factory=weakref.WeakValueDictionary)
    _orders_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.me = self._rrefs.me
        self.my_name = self._rrefs.my_name
        self.check_sharable = self._rrefs.check_sharable
        self.fetch_error = self._rrefs.fetch_error
        self.flush = self._router.flush

    def fetch(self, state: HandleState, timeout_s: float, creation: object = None) -> Any:
        """The value of a reference that another worker owns. If that worker is lost, raises what `fetch_error` makes.

        Args:
            creation: the reference's `Creation`, if this worker created it.
        """
        check_not_forked()
        if timeout_s == UNSET_RPC_TIMEOUT and isinstance(creation, Creation):
            value = self._caller.fetch_created(creation)
            if value is not NOT_INCLUDED:
                return value
        return self._caller.fetch(self._rrefs.owner_of(state), ReferenceShare(state.rref, state.id), timeout_s)

    async def find_owner(self, state: HandleState) -> None:
        """Asks the coordinator for the owner if it is unknown here, as in `_start_call`."""
        await self._directory.look_up((self._rrefs.owner_of(state),))

    def start_fetch(self, state: HandleState, timeout_s: float) -> Future[Any]:
        check_not_forked()
        share = ReferenceShare(state.rref, state.id)
        future = self._caller.start_fetch(self._rrefs.owner_of(state), share, timeout_s)
        future.is_quiet = True
        return future

    def call(self, to: Destination, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        return self._caller.sync(to, Invocation(func, args, timeout_s=timeout_s))

    def rpc_sync(self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        if running_actor.get() is not None and func is proxied._local_invoke:
            self._check_not_inside(rref._handle.state, args[0], timeout_s)
        return self._caller.sync(*self._on_value(rref, func, args, timeout_s))

    def rpc_async(self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        owner, what = self._on_value(rref, func, args, timeout_s)
        if profile.running and (found := profile.here()) is not None:  # without the events of the owner
            key = profiling_key("async", func.__name__, self.my_name, self._directory.name_of(owner))
            with profiler.record_function(key):
                ended = found.add(key, self.me.worker)
                future = self._start_call(owner, what)
            future._when_done(partial(ended, None))
        else:
            future = self._start_call(owner, what)
        note_started(future)
        return future

    def _start_call(self, owner: int, what: Invocation) -> Future[Any]:
        """A reference may come from a worker that knows its owner while this one does not yet."""
        return (self._retries if self._retries.asks_first(owner) else self._caller).start_call(owner, what)

    def remote_on(self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        return self.remote(*self._on_value(rref, func, args, timeout_s))

    # ------------------------------------------------------------ calls of actors

    def in_turn(
        self, rref: Any, mode: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """Calls a method of an actor in its turn.

        Args:
            rref: the reference; kept alive until the call has ended.
            mode: see `rpcdist.rpc._rref.proxied.Mode`.
            timeout_s: limit for the call, including the wait for its turn.
        """
        if mode == "rpc_sync" and running_actor.get() is not None:
            self._check_not_inside(rref._handle.state, method, timeout_s)
        state = self._rrefs.check_sharable(rref)
        owner = self._rrefs.owner_of(state)
        order: CallOrder = rref._order or self.order_of(state.rref)
        rref._order = order
        number = order.begin()
        packed: tuple[Any, ...] = (tuple(number), method, args, kwargs)
        on: Handle | None = rref._handle if state.id != state.rref else None
        if on is None:  # made here from a value: it may not be in the reference tables, so send it as an argument
            packed = (rref, *packed)
        what = Invocation(proxied._invoke_in_turn, packed, None, timeout_s, on)
        end = partial(self._end_turn, order, number.number, owner, rref)
        try:
            if mode == "rpc_sync":
                result = self._caller.sync(owner, what)
                end(None)
                return result
            if mode == "remote":
                result = self.remote(owner, what)
                future = result._get_future()
            else:
                result = future = self._start_call(owner, what)
                note_started(future)
        except BaseException as exc:
            end(exc)
            raise
        future._observe(lambda: end(future._error))
        return result

    def order_of(self, rref: RRefId) -> CallOrder:
        """Returns the actor's `CallOrder`, which all references to the actor share and, with open calls, keep alive."""
        with self._orders_lock:
            order = self._orders.get(rref)
            if order is None:
                order = self._orders[rref] = CallOrder(next(self._streams))
            return order

    def _end_turn(self, order: CallOrder, number: int, owner: int, rref: Any, error: BaseException | None) -> None:
        def report(stream: int, numbers: tuple[int, ...]) -> Future[Any]:
            return self._retries.start_call(owner, Invocation(proxied._turns_over, (rref, stream, numbers)))

        order.end(number, error is None, report)

    def _check_not_inside(self, state: HandleState, method: str, timeout_s: float) -> None:
        """Raises `RRefError` if a method of an actor would wait for its own actor; waits until the value exists."""
        owned = state.owned
        if owned is None:
            return
        deadline = self._caller.deadline_of(timeout_s)
        if owned.exception(deadline.wait_s()) is None and self._actors.runs_here(state.rref, owned.value()):
            raise RRefError(
                f"a method of this actor calls {method}() of the same actor and waits for it. That would wait forever, "
                f"since one call runs at a time. Call it on self, or do not wait (rref.rpc_async().{method}(...))"
            )

    def turns_over(self, rref: Any, stream: int, numbers: tuple[int, ...]) -> None:
        """Ends turns; runs at the owner, called by the worker that made the calls. Raises `RpcdistError`."""
        if type(stream) is not int or type(numbers) is not tuple or any(type(number) is not int for number in numbers):
            raise RpcdistError("the end of an actor's calls needs the number of their stream, and a tuple of numbers")
        state, caller = rref._handle.state, calling_worker.get()
        if caller is None or state.owned is None:
            raise CallRefused("only a worker that made calls of an actor may report their end, and only to the owner")
        who, over = caller.process, self._actors.over

        def is_there(value: Future[Any]) -> None:
            if value.exception() is None:
                over(state.rref, value.value(), who, stream, numbers)

        state.owned._when_done(is_there)  # the value determines the actor

    def _on_value(
        self, rref: Any, func: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> tuple[int, Invocation]:
        """The owner, and the call of a function of the value, which names the reference unless this is the owner."""
        state = self._rrefs.check_sharable(rref)
        if state.owned is not None:
            return state.owner.worker, Invocation(func, (rref, *args), None, timeout_s)
        return self._rrefs.owner_of(state), Invocation(func, args, None, timeout_s, rref._handle)

    def remote(self, to: Destination, what: Invocation, is_serial: bool = False) -> Any:
        """Calls a function whose result stays on that worker; returns a reference to the result at once.

        Args:
            is_serial: whether calls of its methods run one at a time.
        """
        owner = self._directory.resolve(to)
        if owner != self.me.worker and not self._router.is_reachable(owner):
            self._router.reach(owner, lambda: self._rrefs.is_lost(owner), self._caller.deadline_of(what.timeout_s))
        # A method of an actor may return that actor, so calls of the result are numbered, too.
        on = what.target_ref
        rref, share = self._rrefs.create_remote(owner, is_serial or (on is not None and on.state.is_serial))
        try:
            rref._creation = self._caller.remote(owner, what, share, self._rrefs, is_serial)
        except BaseException as exc:
            self._rrefs.on_creation_failed(share, exc)
            raise
        if isinstance(what.func, type):
            rref._kind = what.func.__name__
        return rref

    def backward(self, context_id: int, root: torch.Tensor, retain_graph: bool) -> None:
        deadline = self._caller.deadline_of(UNSET_RPC_TIMEOUT)
        self._autograd.backward(context_id, [root], retain_graph, self._autograd_mode, deadline)

    def on_broken(self, session: AnySession, reason: str) -> None:
        """Finds the shares of references that were lost with messages of a session that has ended.

        Calls that are still in flight return their shares themselves when they end.
        """
        peer = session.peer.id
        if not self._lifetime.is_closed and self._directory.knows(peer):
            in_flight = [
                share
                for call in self._caller.calls
                if call.peer == peer
                for share in call.forks or ()
                if isinstance(share, value_pb2.RRefFork)
            ]
            self._rrefs.connection_broken(peer, in_flight)
