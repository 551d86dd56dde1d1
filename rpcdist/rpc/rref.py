"""Remote references: handles on values that live on one worker, for use on any worker.

    rref = rpc.remote("worker1", torch.zeros, args=(3,))    # returns at once; worker1 owns the tensor
    rref.to_here()                                          # a copy
    rref.rpc_sync().sum()                                   # a method, run where the value is
    rpc.rpc_sync("worker2", use, args=(rref,))              # worker2 holds it now, too

The value lives until no reference is left; `docs/rref.md` explains how references are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

import torch

from rpcdist.deadline import Deadline, checked_timeout, current_deadline
from rpcdist.errors import BlockingInLoop, ConfigError, NotInitialized, RRefError, WorkerLost
from rpcdist.rpc._calling.creations import Creation
from rpcdist.rpc._calling.result_streams import Stream
from rpcdist.rpc._calling.rref_calls import RRefCalls
from rpcdist.rpc._current import agent_or_none, current_agent
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.rpc._rref import proxied
from rpcdist.rpc._rref.handles import Handle, derived_future, wait_for_value
from rpcdist.rpc._rref.proxied import MethodProxy, Mode, method_name
from rpcdist.rpc._values.exceptions import copied
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.rpc.worker_info import WorkerInfo

__all__ = ["PyRRef", "RRef"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Later = Coroutine[Any, Any, R] | torch.futures.Future[R]
"""The result of a coroutine function or an `async_execution` function; the callee waits for it."""

Items = Iterator[R] | AsyncIterator[R]
"""The result of a generator function at the callee. Its caller gets a `Stream`."""

NOT_PICKLABLE = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
TRAVELS_IN_CALLS = "a remote reference travels only in the arguments or the result of a call, which name its receiver"
USE_AFTER_DELETION = "Cannot call to_here() on it after deletion."


class RRef(Generic[T]):
    """A reference to a value on one worker, its owner. Any thread may call any method.

    A reference that is made from a value is its owner's: it holds the value itself. Others come from `rpc.remote`, or
    arrive in arguments and results. Two references to one value are different objects and compare unequal.

    Args:
        value: any object. It stays on this worker; other workers reach it through this one.
        type_hint: for a TorchScript module only, as in torch; ignored, since the type is read from the value.

    Raises:
        NotInitialized: before `init_rpc`, or after `shutdown`.
        ConfigError: a type hint for another value.
    """

    __slots__ = ("__weakref__", "_calls", "_creation", "_handle", "_kind", "_order", "_profiled", "_type_future")

    def __init__(self, value: T, type_hint: object = None) -> None:
        if agent_or_none() is None:
            raise NotInitialized(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
            )
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule):
            raise ConfigError("type_hint should only be specified when the RRef being created contains a ScriptModule.")
        agent = current_agent()
        handle = agent.rrefs.own(value)
        handle.state.is_serial = agent.actors.is_actor(value)
        self._set(agent.rref_calls, handle)

    @classmethod
    def _of(cls, calls: RRefCalls, handle: Handle) -> RRef[Any]:
        rref = cls.__new__(cls)
        rref._set(calls, handle)
        return rref

    def _set(self, calls: RRefCalls, handle: Handle) -> None:
        self._calls = calls
        self._handle = handle
        self._creation: Creation | None = None  # None if it was not made by `remote` here
        self._kind = ""  # the name of the value's class, if it was known from the start
        self._order: object = None  # of the calls of an actor
        self._type_future: Future[type] | None = None
        self._profiled: Future[Any] | None = None

    if not TYPE_CHECKING:  # type checkers know the existing attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(
                f"a remote reference has no attribute {name!r}; its value on {self.owner_name()!r} may have it. "
                f"Write rref.rpc_sync().{name}(...) to use it there, or rref.to_here().{name} to use a copy here"
            )

    # ------------------------------------------------------------ owner

    def is_owner(self) -> bool:
        """Whether the value lives in this process."""
        return self._handle.state.owned is not None

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives; calls accept it as their destination."""
        state = self._handle.state
        return WorkerInfo(state.owner_name, state.owner.worker)

    def owner_name(self) -> str:
        """The owner's name."""
        return self._handle.state.owner_name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner counts this reference; for a result of `remote`, whether the value was created."""
        return self._handle.state.confirmed

    # ------------------------------------------------------------ the value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Waits until the value exists, and returns it: the object itself at the owner, a copy elsewhere.

        Args:
            timeout: limit in seconds for creation and transfer together; -1 uses the default of `init_rpc`, 0 means no
                limit. At the owner, the default is the remaining time of the call that this thread handles.

        Raises:
            DeadlineExceeded: the timeout expired.
            OwnerLost: the owner died.
            LeaseExpired: the owner received nothing from this process for too long.
            BlockingInLoop: called on an event loop's thread; write `await rref`.
            Exception: the error of the function that `remote` called.
        """
        if self.is_owner():
            return self._wait_for_value(timeout)
        state = self._handle.state
        state.check(USE_AFTER_DELETION)
        try:
            return cast(T, self._calls.fetch(state, timeout, self._creation))
        except WorkerLost as exc:
            raise self._calls.fetch_error(state, exc) from exc

    def __await__(self) -> Generator[Any, None, T]:
        """`to_here` without blocking. Cancelling the task ends the transfer; the value stays as it is."""
        state = self._handle.state
        state.check(USE_AFTER_DELETION)
        if state.owned is not None:
            return cast(T, (yield from derived_future(state.owned).__await__()))
        try:
            yield from self._calls.find_owner(state).__await__()
            return cast(T, (yield from self._calls.start_fetch(state, UNSET_RPC_TIMEOUT).__await__()))
        except WorkerLost as exc:
            raise self._calls.fetch_error(state, exc) from exc

    def local_value(self) -> T:
        """Waits until the value exists, and returns the value itself; for the owner only.

        Raises:
            RRefError: this process is not the owner.
        """
        if not self.is_owner():
            state = self._handle.state
            me = WorkerInfo(self._calls.my_name, self._calls.me.worker)
            raise RRefError(
                f"For {self._identifiers()}, can't call localValue() on user {me}. Call it on owner {self.owner()} "
                f"(or copy the value with to_here(); {state.owner_name!r} is where it lives)"
            )
        return self._wait_for_value(UNSET_RPC_TIMEOUT)

    def _wait_for_value(self, timeout: float) -> T:
        state = self._handle.state
        if state.error is not None:
            raise copied(state.error)
        assert state.owned is not None  # the caller has asked is_owner()
        deadline = current_deadline.get()
        if timeout != UNSET_RPC_TIMEOUT:
            deadline = deadline.earlier(Deadline.after(checked_timeout(timeout) or None))
        return cast(T, wait_for_value(state.owned, state.rref, deadline.wait_s()))

    # ------------------------------------------------------------ calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> MethodProxy[Any]:
        """`rref.rpc_sync().method(*args)` runs the method at the owner and returns its result."""
        return MethodProxy(_call, self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> MethodProxy[Future[Any]]:
        """`rref.rpc_async().method(*args)` runs the method at the owner and returns a future of its result."""
        return MethodProxy(_call, self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> MethodProxy[RRef[Any]]:
        """`rref.remote().method(*args)` runs the method at the owner, and returns a reference to its result."""
        return MethodProxy(_call, self, "remote", timeout)

    @overload
    def call(self, method: Callable[Concatenate[T, P], Later[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(
        self, method: Callable[Concatenate[T, P], Items[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R]: ...
    @overload
    def call(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`rref.call(Counter.add, 1)` is `rref.rpc_sync().add(1)` with arguments and result that type checkers know.

        If the value is of a subclass that overrides the method, the override runs.
        """
        return getattr(self.rpc_sync(), method_name(method))(*args, **kwargs)

    @overload
    def call_async(
        self, method: Callable[Concatenate[T, P], Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call_async(
        self, method: Callable[Concatenate[T, P], Items[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[Stream[R]]: ...
    @overload
    def call_async(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def call_async(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """`await rref.call_async(Counter.add, 1)` is `await rref.rpc_async().add(1)`, type-checked like `call`."""
        future: Future[Any] = getattr(self.rpc_async(), method_name(method))(*args, **kwargs)
        return future

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, fetched from the owner once; with `blocking=False`, a future of the type."""
        future = self._type_future
        if future is None or (future.done() and future.exception() is not None):
            future = self._type_future = self._ask_type(timeout)
        if not blocking:
            return future
        try:
            return future.wait()
        except BaseException:
            # The frames of the error hold this reference: with the future, it would live until the next collection.
            self._type_future = None
            raise
        finally:
            del future  # it holds the error, and the error holds this frame

    def _ask_type(self, timeout: float) -> Future[type]:
        if self.is_owner():
            future: Future[type] = Future()
            future.set_result(type(self.local_value()))
            return future
        self._handle.state.check(USE_AFTER_DELETION)
        asked: Future[type] = self._calls.rpc_async(self, proxied._rref_typeof_on_owner, (), timeout)
        asked.is_quiet = True
        return asked

    def cancel(self) -> bool:
        """Cancels the creation of the value if `rpc.remote` or `rref.remote()` on this worker began it.

        The reference fails with an `RRefError` that says so. A coroutine is cancelled at the owner; a plain function
        continues there, and its result is dropped. An actor that exists ends with its last reference.

        Returns:
            False if the value existed already, or another worker created it; nothing changes then.
        """
        return self._creation is not None and self._creation.cancel()

    def _get_future(self) -> Future[Any]:
        """The future of the `remote` call that made this reference; a completed future if no such call did."""
        if self._creation is not None:
            self._calls.flush(self._handle.state.owner.worker)
            return self._creation.future()
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def _get_profiling_future(self) -> Future[Any] | None:
        """Done when the profile that ran during the `remote` call includes that call; None if no profile ran."""
        return self._profiled

    @off_loop("await rref.backward_async(...)")
    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass with the value as root; blocks.

        Args:
            dist_autograd_ctx_id: the context of a distributed backward pass, which begins at the owner; -1, at the
                owner only, runs a local pass.
            retain_graph: keep the graph for another pass.

        Raises:
            RRefError: the value is not a tensor, or this is not the owner and no context is given. Otherwise as
                `rpcdist.autograd.backward`.
        """
        if not self.is_owner():
            if dist_autograd_ctx_id == -1:
                raise RRefError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            arguments = (self, dist_autograd_ctx_id, retain_graph)
            self._calls.call(self.owner(), proxied._backward, arguments, UNSET_RPC_TIMEOUT)
            return
        value = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise RRefError("RRef should contain a tensor for .backward()")
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return
        self._calls.backward(dist_autograd_ctx_id, value, retain_graph)

    backward_async = async_form(backward)

    # ------------------------------------------------------------ as an object

    def __str__(self) -> str:
        return str(self._handle.state)

    def __repr__(self) -> str:
        state = self._handle.state
        kind, known = self._kind, self._type_future
        error: BaseException | None = state.error
        is_ready = state.confirmed
        if known is not None and known.done() and known.exception() is None:
            kind = known.value().__name__
        if state.owned is not None:
            value = state.owned
            is_ready = value.done()
            if error is None and is_ready:
                error = value.exception()
            if is_ready and error is None:
                kind = type(value.value()).__name__
        status = "ready" if is_ready else "not there yet"
        if error is not None:
            status = f"failed: {type(error).__name__}"
        elif state.deleted:
            status = "deleted"
        return f"<RRef of {kind or 'a value'} on {state.owner_name!r}, {status}>"

    def _identifiers(self) -> str:
        """The reference in torch's words."""
        state = self._handle.state
        if state.owned is not None:
            return f"OwnerRRef({state.rref})"
        return f"UserRRef(rref_id={state.rref}, fork_id={state.id})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RRefError(NOT_PICKLABLE)

    def _serialize(self) -> NoReturn:
        """torch's name for manual pickling, which is not supported: sharing a reference needs a receiver."""
        self._calls.check_sharable(self)
        raise RRefError(TRAVELS_IN_CALLS)

    @staticmethod
    def _deserialize(serialized: object) -> NoReturn:
        raise RRefError(TRAVELS_IN_CALLS)

    def __copy__(self) -> RRef[T]:
        return self

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RRefError("a remote reference does not support deepcopy; copy its value: rref.to_here()")


PyRRef = RRef
"""torch's name of the class that its `remote` returns: programs ask `type(rref) is PyRRef`."""


def _call(rref: RRef[Any], mode: Mode, method: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    calls = rref._calls
    if mode == "rpc_sync" and asyncio._get_running_loop() is not None:
        raise BlockingInLoop(f"rref.rpc_sync().{method}()", f"await rref.rpc_async().{method}(...)")
    if rref._handle.state.is_serial:
        return calls.in_turn(rref, mode, method, args, kwargs, timeout)
    start = calls.rpc_sync if mode == "rpc_sync" else calls.rpc_async if mode == "rpc_async" else calls.remote_on
    return start(rref, proxied._local_invoke, (method, args, kwargs), timeout)
