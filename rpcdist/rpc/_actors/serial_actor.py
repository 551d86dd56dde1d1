"""An actor at its owner: runs the method calls one at a time.

A waiting call holds no thread. The current call runs on the thread that the actor keeps for its lifetime, or on the
user loop if its method is a coroutine function; its turn lasts until it has ended. So an actor that blocks delays only
its own callers.
"""

from __future__ import annotations

import inspect
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any

import torch

from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import DeadlineExceeded, Overloaded, on_error
from rpcdist.ids import ProcessId
from rpcdist.inspection import ActorFacts
from rpcdist.rpc._actors.turn_queue import CallNumber, TurnQueue
from rpcdist.rpc._executors.deferred_replies import DeferredReply
from rpcdist.rpc._executors.lane import Lane
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._rref.messages import RRefId
from rpcdist.rpc._serving.producers import is_generator
from rpcdist.rpc.functions import is_async_execution
from rpcdist.rpc.future import Future

ActorCaller = tuple[ProcessId, RRefId]
"""A process and the reference that it calls; the calls of each such pair are ordered."""


class Turn(Future[Any]):
    """The future of one call's result. Its creator calls `enter` once it is ready for the result.

    Args:
        number: the caller's number for the call; None if the caller did not know that it calls an actor.

    Attributes:
        began: when the turn began, in monotonic seconds; 0 before.
        thread: ident of the thread that completes the future as the last step of its job; 0 if unknown.
        reply: the call's reply, for that thread to return from its job.
    """

    __slots__ = (
        "args", "began", "context", "coroutine", "deadline", "host", "kwargs", "method", "number", "reply", "target",
        "thread", "who",
    )  # fmt: skip

    def __init__(
        self,
        host: SerialActor,
        target: object,
        who: ActorCaller,
        number: CallNumber | None,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(on_cancel=self._on_cancelled)
        self.is_quiet = True  # the caller gets the error
        self.host = host
        self.target = target
        self.who = who
        self.number = number
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.deadline: Deadline = current_deadline.get()
        self.context: Context = copy_context()  # with the call's deadline and autograd context
        self.began = 0.0
        self.thread = 0
        self.reply: DeferredReply | None = None
        self.coroutine: Callable[[], object] | None = None  # cancels it, while it runs

    def __repr__(self) -> str:
        number = "without a number" if self.number is None else self.number.number
        return f"<Turn {number} of {self.who!r}: {self.method}>"

    def enter(self) -> DeferredReply | None:
        """Waits for the turn without holding a thread; returns the reply if the call has already ended."""
        return self.host.enter(self)

    def take_reply(self) -> DeferredReply | None:
        """Removes and returns the reply, to break its reference cycle with the call and this turn."""
        reply, self.reply = self.reply, None
        return reply

    def forget_arguments(self) -> None:
        """Drops the arguments and the object, before the caller gets the result."""
        self.target, self.args, self.kwargs = None, (), {}

    def _on_cancelled(self) -> None:
        self.host.on_cancelled(self)


running_actor: ContextVar[RRefId | None] = ContextVar("rpcdist_running_actor", default=None)
"""The actor whose method runs in this context."""


class SerialActor:
    """Runs the calls of one actor; thread-safe. The `ActorTable` sets the attributes after `lane`.

    Attributes:
        lane: runs the constructor and plain methods.
        num_references: references that a `remote(serial=True)` made.
        object_ids: the `id`s of the objects that lead to the actor.
        kind, num_restarts: the name of the object's class, and how often the object was recreated.
    """

    def __init__(self, rref: RRefId, pool: ThreadPool, user_loop: UserLoop) -> None:
        self.rref = rref
        self.lane = Lane(pool)
        self.num_references = 1
        self.object_ids: tuple[int, ...] = ()
        self.kind = ""
        self.num_restarts = 0
        self._pool = pool
        self._user_loop = user_loop
        self._lock = threading.Lock()  # guards the next two
        self._queue: TurnQueue[ActorCaller, Turn] = TurnQueue()
        self._running: Turn | None = None

    def facts(self, now: float) -> ActorFacts:
        """Describes the running and waiting calls at `now` (monotonic seconds); any thread, without the lock."""
        running = self._running
        method = "" if running is None else running.method
        running_s = now - running.began if running is not None and running.began else None
        return ActorFacts(repr(self.rref), method, running_s, len(self._queue), self.kind[:200], self.num_restarts)

    def enter(self, turn: Turn) -> DeferredReply | None:
        """See `Turn.enter`. If the actor is free and this is its thread, the call runs at once."""
        refusal: Exception | None = None
        first: Turn | None
        number = turn.number
        with self._lock:
            if number is None:
                self._queue.join(turn.who, turn)
                first = self._take()
            elif self._running is None and not turn.done() and self._queue.pass_by(turn.who, number):
                self._running = first = turn
            else:
                try:
                    self._queue.arrive(turn.who, number, turn)
                except Overloaded as exc:
                    refusal = exc
                first = self._take()
        if refusal is not None:
            turn.forget_arguments()
            turn._fail(refusal)
        if first is turn and self.lane.is_here:
            return self._run(turn)
        self._submit(first)
        return None

    def over(self, who: ActorCaller, stream: int, numbers: tuple[int, ...]) -> None:
        """Records that these calls have ended at their caller, and may never arrive."""
        with self._lock:
            self._queue.over(who, stream, numbers)
            first = self._take()
        self._submit(first)

    def gone(self, who: ProcessId) -> None:
        with self._lock:
            for caller in self._queue.callers:
                if caller[0] == who:
                    self._queue.gone(caller)
            first = self._take()
        self._submit(first)

    def forget(self, rref: RRefId, callers: Iterable[ProcessId]) -> None:
        with self._lock:
            for who in callers:
                self._queue.gone((who, rref))
            first = self._take()
        self._submit(first)

    def on_cancelled(self, turn: Turn) -> None:
        """Cancels a running coroutine. A waiting call only keeps its place, for the order of the others."""
        cancel = turn.coroutine
        if cancel is not None:
            cancel()
            return
        with self._lock:
            if turn is not self._running:
                turn.forget_arguments()

    # ------------------------------------------------------------ turns

    def _take(self) -> Turn | None:
        """Begins the next turn if none is running, and drops calls that have already ended; with the lock."""
        if self._running is not None:
            return None
        while (turn := self._queue.take()) is not None:
            if not turn.done():
                break
        self._running = turn
        return turn

    def _submit(self, turn: Turn | None) -> None:
        if turn is not None:
            self.lane.submit(turn.context.run, self._run, turn)

    def _run(self, turn: Turn) -> DeferredReply | None:
        """Runs a call on the actor's thread, in the call's context. Returns the reply if it is ready."""
        token = running_actor.set(self.rref)
        turn.thread = get_ident()
        lasts = False
        try:
            if turn.deadline.expired():
                raise DeadlineExceeded(
                    f"RPC ran for more than set timeout: the deadline passed while {turn.method}() waited for "
                    f"{_name(turn)}, which runs one call at a time"
                )
            turn.began = time.monotonic()
            lasts = self._call(turn)
        except BaseException as exc:  # `SystemExit` too: the caller gets it
            turn.forget_arguments()
            turn._fail(exc)
        finally:
            running_actor.reset(token)
            if not lasts:
                self._end(turn)
        return turn.take_reply()

    def _call(self, turn: Turn) -> bool:
        """Calls the method; True if the turn continues as a coroutine."""
        method, name = getattr(turn.target, turn.method), _name(turn)
        args, kwargs = turn.args, turn.kwargs
        turn.forget_arguments()
        if not callable(method) and not args and not kwargs:  # reads an attribute
            turn._complete(method)
            return False
        result = method(*args, **kwargs)
        del args, kwargs
        if inspect.iscoroutine(result):
            turn.thread = 0
            self._start(turn, result)
            return True
        if isinstance(result, torch._C.Future) and is_async_execution(method):
            turn.thread = 0
            result.add_done_callback(partial(_pass_on, turn))
            return False
        if is_generator(result):
            raise TypeError(
                f"{turn.method}() of {name} is a generator function: its items would be produced while other calls "
                "run. Return a list, or create the actor without serial=True"
            )
        if self._queue.has_ready:
            # The next call starts now, and its method may hold the GIL and so delay this answer.
            turn.thread = 0
        turn._complete(result)
        return False

    def _start(self, turn: Turn, coroutine: Coroutine[Any, Any, Any]) -> None:
        def done(outcome: object, error: BaseException | None) -> None:
            self._pool.submit(self._conclude, turn, outcome, error)  # encoding the result may be slow

        async def run() -> object:
            return await coroutine

        with on_error(coroutine.close):
            call = self._user_loop.submit(run, done, deadline=turn.deadline, context=copy_context(), name=turn.method)
        turn.coroutine = call.cancel
        if turn.done():  # cancelled between the check and here
            call.cancel()

    def _conclude(self, turn: Turn, outcome: object, error: BaseException | None) -> DeferredReply | None:
        turn.thread = get_ident()
        try:
            if error is None:
                turn._complete(outcome)
            else:
                turn._fail(error)
        finally:
            self._end(turn)
        return turn.take_reply()

    def _end(self, turn: Turn) -> None:
        with self._lock:
            self._running = None
            following = self._take() if self._queue.has_ready else None
        if following is not None:
            self._submit(following)


def _name(turn: Turn) -> str:
    return f"the actor {type(turn.target).__name__}"


def _pass_on(turn: Turn, done: torch._C.Future[Any]) -> None:
    """Copies the outcome of the future that an `async_execution` method returned."""
    try:
        result = done.wait()
    except BaseException as exc:
        turn._fail(exc)
    else:
        turn._complete(result)
