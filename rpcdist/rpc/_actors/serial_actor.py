"""An actor at its owner: runs the calls of its value's methods one at a time.

A call that waits holds no thread. The one whose turn it is runs on the thread that the actor keeps for its life, or, if
its method is a coroutine function, on the user loop; the turn lasts until that has ended. So an actor that blocks holds
up its own callers, and nobody else.
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
from rpcdist.errors import DeadlineExceeded, Overloaded
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
"""A process, and the reference through which it calls: the calls of each have an order."""


class Turn(Future[Any]):
    """The future of the call's result. Its maker calls `enter` when it can take the result.

    Args:
        number: which of its calls through that one; None where the caller did not know that it calls an actor.

    Attributes:
        began: when its turn came, in seconds of the monotonic clock; 0 before.
        thread: the one that completes it, and has nothing else to do for the call; 0 while that is unknown.
        reply: of the call, for that thread to return from its job.
    """

    __slots__ = (
        "args",
        "began",
        "context",
        "coroutine",
        "deadline",
        "host",
        "kwargs",
        "method",
        "number",
        "reply",
        "target",
        "thread",
        "who",
    )

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
        self.is_quiet = True  # the error goes to the caller
        self.host = host
        self.target = target
        self.who = who
        self.number = number
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.deadline: Deadline = current_deadline.get()
        self.context: Context = copy_context()  # with deadline and autograd context of the call
        self.began = 0.0
        self.thread = 0
        self.reply: DeferredReply | None = None
        self.coroutine: Callable[[], object] | None = None  # cancels it, while it runs

    def __repr__(self) -> str:
        number = "without a number" if self.number is None else self.number.number
        return f"<Turn {number} of {self.who!r}: {self.method}>"

    def enter(self) -> DeferredReply | None:
        """Waits for its turn, without a thread; returns the reply if it is over at once."""
        return self.host.enter(self)

    def take_reply(self) -> DeferredReply | None:
        """Lets go of it, since it holds the call, and that holds the turn."""
        reply, self.reply = self.reply, None
        return reply

    def forget_arguments(self) -> None:
        """Lets go of them and of the object, before the caller hears that the call is over."""
        self.target, self.args, self.kwargs = None, (), {}

    def _on_cancelled(self) -> None:
        self.host.on_cancelled(self)


running_actor: ContextVar[RRefId | None] = ContextVar("rpcdist_running_actor", default=None)
"""The actor one of whose methods runs here."""


class SerialActor:
    """Any thread may call any method.

    Attributes:
        lane: runs plain methods, and the constructor.
        num_references, object_ids: those that a `remote(serial=True)` made, and the `id`s of the objects that lead to
            the actor, as soon as they exist; kept by the `ActorTable`.
        kind, num_restarts: the class of the object, and how often it was made again; of the same.
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
        self._lock = threading.Lock()  # around the two below
        self._queue: TurnQueue[ActorCaller, Turn] = TurnQueue()
        self._running: Turn | None = None

    def facts(self, now: float) -> ActorFacts:
        """The call that runs, and those that wait, at a moment of the monotonic clock; any thread, without the lock."""
        running = self._running
        method = "" if running is None else running.method
        running_s = now - running.began if running is not None and running.began else None
        return ActorFacts(repr(self.rref), method, running_s, len(self._queue), self.kind[:200], self.num_restarts)

    def enter(self, turn: Turn) -> DeferredReply | None:
        """See `Turn.enter`. A call that finds the actor free runs at once, if this is the thread of the actor."""
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
        if first is not None:
            self._submit(first)
        return None

    def over(self, who: ActorCaller, stream: int, numbers: tuple[int, ...]) -> None:
        """These calls have ended for their caller, and may never come."""
        with self._lock:
            self._queue.over(who, stream, numbers)
            first = self._take()
        if first is not None:
            self._submit(first)

    def gone(self, who: ProcessId) -> None:
        """A process is dead."""
        with self._lock:
            for caller in self._queue.callers:
                if caller[0] == who:
                    self._queue.gone(caller)
            first = self._take()
        if first is not None:
            self._submit(first)

    def forget(self, rref: RRefId, callers: Iterable[ProcessId]) -> None:
        """Nobody has this reference any more, through which these processes have called."""
        with self._lock:
            for who in callers:
                self._queue.gone((who, rref))
            first = self._take()
        if first is not None:
            self._submit(first)

    def on_cancelled(self, turn: Turn) -> None:
        """One that waits keeps its place, so that the order of the others holds, and nothing else."""
        cancel = turn.coroutine
        if cancel is not None:
            cancel()
            return
        with self._lock:
            if turn is not self._running:
                turn.forget_arguments()

    # ------------------------------------------------------------ turns

    def _take(self) -> Turn | None:
        """Begins the next turn, if none lasts; with the lock. Those that have ended meanwhile are dropped."""
        if self._running is not None:
            return None
        while (turn := self._queue.take()) is not None:
            if not turn.done():
                break
        self._running = turn
        return turn

    def _submit(self, turn: Turn) -> None:
        self.lane.submit(turn.context.run, self._run, turn)

    def _run(self, turn: Turn) -> DeferredReply | None:
        """Runs a method; on the thread of the actor, in the context of the call. Returns the reply, if it is ready."""
        token = running_actor.set(self.rref)
        turn.thread = get_ident()
        lasts = False
        try:
            if turn.deadline.expired():
                raise DeadlineExceeded(
                    f"RPC ran for more than set timeout: it was over before the turn of {turn.method}() on "
                    f"{_name(turn)}, which runs one call at a time"
                )
            turn.began = time.monotonic()
            lasts = self._call(turn)
        except BaseException as exc:  # `SystemExit` of a method is its caller's business
            turn.forget_arguments()
            turn._fail(exc)
        finally:
            running_actor.reset(token)
            if not lasts:
                self._end(turn)
        return turn.take_reply()

    def _call(self, turn: Turn) -> bool:
        """Calls the method; True if the turn goes on as a coroutine."""
        method, name = getattr(turn.target, turn.method), _name(turn)
        args, kwargs = turn.args, turn.kwargs
        turn.forget_arguments()
        if not callable(method) and not args and not kwargs:  # an attribute: this reads it
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
            # The next call begins now: its method may hold the interpreter's lock, and with it this answer.
            turn.thread = 0
        turn._complete(result)
        return False

    def _start(self, turn: Turn, coroutine: Coroutine[Any, Any, Any]) -> None:
        def done(outcome: object, error: BaseException | None) -> None:
            self._pool.submit(self._conclude, turn, outcome, error)  # encoding a result may be slow

        async def run() -> object:
            return await coroutine

        try:
            call = self._user_loop.submit(run, done, deadline=turn.deadline, context=copy_context(), name=turn.method)
        except BaseException:
            coroutine.close()
            raise
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
        """The turn is over, and its result is encoded; the next begins."""
        with self._lock:
            self._running = None
            following = self._take() if self._queue.has_ready else None
        if following is not None:
            self._submit(following)


def _name(turn: Turn) -> str:
    return f"the actor {type(turn.target).__name__}"


def _pass_on(turn: Turn, done: torch._C.Future[Any]) -> None:
    """The future that an `async_execution` method returned is done."""
    try:
        result = done.wait()
    except BaseException as exc:
        turn._fail(exc)
    else:
        turn._complete(result)
