"""Actors that are recreated with their last state when their worker was lost and another process replaced it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from rpcdist.deadline import NEVER, Deadline, current_deadline
from rpcdist.errors import (
    BlockingInLoop,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    OwnerLost,
    RRefError,
    SerializationError,
    WorkerLost,
    described_error,
)
from rpcdist.ids import Identity
from rpcdist.rpc._actors.checkpointed import ActorState, Checkpointed
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._rref.handles import failed_future
from rpcdist.rpc._rref.proxied import MethodProxy, Mode, method_name
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.rpc.membership import wait_for_worker
from rpcdist.rpc.rref import Later, RRef

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ALWAYS: Final = -1


@dataclass(eq=False)
class _ActorCall:
    """A call of the actor by the user."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    deadline: Deadline
    result: Future[Any]
    creation: Future[Any] | None = None  # of the object that the call was sent to
    context: Context = field(default_factory=copy_context)


def _call(actor: RestartingActor[Any], mode: Mode, method: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    if mode == "rpc_sync" and asyncio._get_running_loop() is not None:
        raise BlockingInLoop(f"actor.rpc_sync().{method}()", f"await actor.rpc_async().{method}(...)")
    result = actor._start(timeout, method, args, kwargs)
    return result if mode == "rpc_async" else result.wait()


class RestartingActor(Generic[T]):
    """An actor that outlives its worker; returned by `rpc.remote(..., serial=True, max_restarts=n)`.

    This object keeps the last state in the memory of the creator's process, and cannot be sent to other workers. If the
    actor's worker is lost, the next call waits until a process with the same name has joined, recreates the object
    there with the original arguments, and passes the state to its `restore`.

    Thread-safe. The calls run one at a time, in the order in which they were made.

    Args:
        kind, args, kwargs: the class and its constructor's arguments.
        timeout: limit for each creation, in seconds; -1 for the default.
        max_restarts: how often the object may be recreated; -1 for no limit.
        checkpoint_every: call `checkpoint()` after every so many calls.

    Raises:
        ConfigError: the class or a number is invalid.
    """

    def __init__(
        self,
        worker: Destination,
        kind: type[T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        max_restarts: int,
        checkpoint_every: int,
    ) -> None:
        self._agent = current_agent()
        _check(kind, max_restarts, checkpoint_every)
        self._worker = self._agent.directory.name_of(self._agent.directory.resolve(worker))
        if self._worker == self._agent.worker_name:
            raise ConfigError(
                "max_restarts= needs an actor on another worker: this process keeps its checkpoint, which would be "
                "lost together with the actor. Create the actor on another worker"
            )
        self._kind, self._args, self._kwargs, self._timeout = kind, args, kwargs, timeout
        self._max_restarts = max_restarts
        self._checkpoint_every = checkpoint_every if hasattr(kind, "checkpoint") else 0
        self._lock = threading.Lock()  # guards all below except the state; keeps calls in order
        self._number = 0  # of the last sent call
        self._restarts = 0
        self._waiting: deque[_ActorCall] = deque()  # wait for the restart, which runs until none waits
        self._sent: set[Future[Any]] = set()  # results of sent calls that are not done
        self._in_doubt = False  # a call was lost, so the worker may be
        self._is_gone = False  # the reference is unusable
        self._is_broken = False  # the object could not be recreated
        self._state_lock = threading.Lock()
        self._state: ActorState | None = None
        self._state_number = 0  # of the call that returned the state
        self._create()

    def __repr__(self) -> str:
        return f"<RestartingActor {self._kind.__name__} on {self._worker!r}, restarted {self._restarts} times>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "an actor with max_restarts= can only be used by its creator, which keeps its state; from other workers, "
            "call a function on the creator that uses the actor"
        )

    @property
    def num_restarts(self) -> int:
        """How often the actor was recreated."""
        return self._restarts

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> MethodProxy[Any]:
        """`actor.rpc_sync().method(*args)` runs the method and returns its result.

        Raises:
            WorkerLost: the worker died meanwhile. With `checkpoint_every=1` the call has had no effect on the state.
            OwnerLost: the worker was lost after `max_restarts` restarts.
            RRefError: recreation failed, because the class or `restore` raised an error; the next call retries.
            DeadlineExceeded: no result before the deadline, perhaps because no replacement had joined.
        """
        return MethodProxy(_call, self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> MethodProxy[Future[Any]]:
        """`actor.rpc_async().method(*args)` returns a future of the result, with the errors of `rpc_sync`."""
        return MethodProxy(_call, self, "rpc_async", timeout)

    @overload
    def call(self, method: Callable[Concatenate[T, P], Later[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`actor.call(Counter.add, 1)` is `actor.rpc_sync().add(1)`, with types checked."""
        return _call(self, "rpc_sync", method_name(method), UNSET_RPC_TIMEOUT, *args, **kwargs)

    @overload
    def call_async(
        self, method: Callable[Concatenate[T, P], Later[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def call_async(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def call_async(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """`await actor.call_async(Counter.add, 1)` is `await actor.rpc_async().add(1)`, with types checked."""
        return self._start(UNSET_RPC_TIMEOUT, method_name(method), args, kwargs)

    # ------------------------------------------------------------ calls

    def _start(self, timeout: float, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        deadline = self._agent.caller.deadline_of(timeout)
        call = _ActorCall(method, args, kwargs, deadline, Future())
        sent = None
        with self._lock:
            if not (self._waiting or self._in_doubt or self._is_broken or self._is_lost()):
                sent = call.context.run(self._send, call)
            if sent is None:
                self._waiting.append(call)
                if len(self._waiting) == 1:
                    self._agent.pool.submit(copy_context().run, self._recover)
        if sent is not None:
            self._pass_on(call, *sent)
        return call.result

    def _send(self, call: _ActorCall) -> tuple[int, Future[Any]] | None:
        """Sends a call to the current object; with the lock.

        Returns:
            The call's number and its future; None if the object is gone but can be recreated.
        """
        self._number += 1
        call.creation = self._creation
        wants_state = self._checkpoint_every > 0 and self._number % self._checkpoint_every == 0
        try:
            sent = self._rref.rpc_async(call.deadline.timeout_s()).invoke_checkpointed(
                call.method, call.args, call.kwargs, wants_state
            )
        except OwnerLost as exc:
            self._is_gone = True
            if self._may_restart():
                return None
            sent = failed_future(exc)
        except Exception as exc:
            sent = failed_future(exc)
        return self._number, sent

    def _pass_on(self, call: _ActorCall, number: int, sent: Future[Any]) -> None:
        """Completes the call with the result of the sent one."""
        call.result._on_cancel = sent.cancel
        sent.is_quiet = True
        self._sent.add(call.result)
        sent._when_done(partial(self._done, call, number))
        if call.result.cancelled():  # perhaps before `_on_cancel` was set
            sent.cancel()

    def _done(self, call: _ActorCall, number: int, sent: Future[Any]) -> None:
        error = sent.exception()
        if error is None:
            answer = sent.value()
            if not _is_answer(answer):
                error = SerializationError(f"worker {self._worker!r} sent an invalid answer to {call.method}()")
        if error is None:
            result, state = answer
            with self._state_lock:
                if state is not None and number > self._state_number:
                    self._state, self._state_number = state, number
            call.result._complete(result)
            self._sent.discard(call.result)
        elif issubclass(type(error), WorkerLost | DeadlineExceeded | Cancelled) or call.creation is None:
            self._failed(call, error)
        else:  # if the creation failed, that may be known here a moment later
            call.creation._when_done(lambda creation: self._failed(call, error, creation.exception()))

    def _failed(self, call: _ActorCall, error: BaseException, creation_error: BaseException | None = None) -> None:
        with self._lock:
            if issubclass(type(error), WorkerLost):
                self._in_doubt = True
                self._is_gone = self._is_gone or issubclass(type(error), OwnerLost)
            if creation_error is not None and self._restarts > 0:
                self._is_broken = self._is_broken or call.creation is self._creation
                error = self._restart_error(creation_error)
        call.result._fail(error)
        self._sent.discard(call.result)

    def _restart_error(self, cause: BaseException) -> RRefError:
        error = RRefError(
            f"the actor {self._kind.__name__} could not be restarted on worker {self._worker!r}: its class or its "
            f"restore() raised {described_error(cause)}. The last checkpoint is kept. Fix the error above; the next "
            "call retries."
        )
        error.__cause__ = cause
        return error

    # ------------------------------------------------------------ restarts

    def _create(self, num_restarts: int = 0) -> None:
        directory = self._agent.directory
        owner = directory.resolve(self._worker)
        self._owner: Identity = directory.member(owner).identity
        made_of = self._kind, self._args, self._kwargs, self._state, num_restarts
        what = Invocation(Checkpointed, made_of, None, self._timeout)
        self._rref: RRef[Checkpointed] = self._agent.rref_calls.remote(owner, what, is_serial=True)
        self._creation = self._rref._get_future()
        self._creation.is_quiet = True  # the calls raise its error
        self._in_doubt = self._is_gone = self._is_broken = False

    def _is_lost(self) -> bool:
        return self._is_gone or not self._agent.directory.lives(self._owner)

    def _may_restart(self) -> bool:
        return self._max_restarts == ALWAYS or self._restarts < self._max_restarts

    def _recover(self) -> None:
        """Checks whether the worker is lost, recreates the actor if so, and sends the waiting calls; in the pool."""
        current_deadline.set(NEVER)  # each waiting call has its own
        while (deadline := self._drop_ended()) is not None:
            try:
                if self._may_restart() or not self._is_lost():
                    wait_for_worker(self._worker, deadline.timeout_s())
                if self._is_lost():
                    for result in tuple(self._sent):  # an answer that is still being decoded may have a newer state
                        result.exception(deadline.wait_s())
                self._resume()
            except DeadlineExceeded:
                continue  # the earliest deadline has passed
            except Exception as exc:
                self._fail_waiting(exc)

    def _drop_ended(self) -> Deadline | None:
        """Fails calls whose deadline has passed; returns the earliest deadline of the rest, or None if none waits."""
        with self._lock:
            over = [call for call in self._waiting if call.deadline.expired() or call.result.done()]
            self._waiting = deque(call for call in self._waiting if call not in over)
            deadlines = [call.deadline for call in self._waiting]
        for call in over:
            call.result._fail(
                DeadlineExceeded(
                    f"worker {self._worker!r} of the actor {self._kind.__name__} was lost, and no process with "
                    f"its name joined before the deadline of {call.method}(). Start one"
                )
            )
        return min(deadlines, key=lambda deadline: deadline.at, default=None)

    def _resume(self) -> None:
        with self._lock:
            if self._is_lost() and self._may_restart():
                self._create(self._restarts + 1)
                self._restarts += 1
            elif self._is_broken and not self._is_lost():
                self._create(self._restarts)
            self._in_doubt = False
            sent = []
            while self._waiting and (one := self._waiting[0].context.run(self._send, self._waiting[0])) is not None:
                sent.append((self._waiting.popleft(), *one))
        for call, number, future in sent:
            self._pass_on(call, number, future)

    def _fail_waiting(self, error: Exception) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.result._fail(error)


def _check(kind: object, max_restarts: object, checkpoint_every: object) -> None:
    if not isinstance(kind, type):
        raise ConfigError(f"max_restarts= needs a class that it can instantiate again, not {kind!r:.100}")
    name = kind.__name__
    if hasattr(kind, "checkpoint") != hasattr(kind, "restore"):
        missing = "restore(state)" if hasattr(kind, "checkpoint") else "checkpoint()"
        raise ConfigError(f"{name} has only one of checkpoint() and restore(state); add {missing}")
    if inspect.iscoroutinefunction(getattr(kind, "checkpoint", None)):
        raise ConfigError(f"{name}.checkpoint must be a plain function: write it with def, not async def")
    for what, number, least in (("max_restarts", max_restarts, ALWAYS), ("checkpoint_every", checkpoint_every, 1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigError(f"{what} must be a whole number of at least {least}, not {number!r}")


def _is_answer(answer: object) -> bool:
    """Validates an answer, (result, `ActorState` or None), because the actor's worker may send anything."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return False
    return answer[1] is None or (isinstance(answer[1], tuple) and len(answer[1]) == 1)
