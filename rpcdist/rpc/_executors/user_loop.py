"""The event loop for the user's `async def` functions: one thread for any number of waiting handlers.

Rules:
 1. Every coroutine, including tasks that user code starts, has its own torch state (torch_state.py); between steps the
    thread has torch's initial state.
 2. `on_done` is called exactly once per submission, on this loop's thread, when the coroutine has ended or will never
    start. (For coroutines that do not end, `close` calls it, perhaps on another thread.)
 3. `SystemExit` and `KeyboardInterrupt` raised by user code are outcomes like others; they do not end the loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rpcdist.at_exit import STARTS_NO_THREAD, register_at_exit, unregister_at_exit
from rpcdist.deadline import NEVER, Deadline, current_deadline
from rpcdist.errors import Cancelled, DeadlineExceeded, ForkedProcess, NotInitialized, TransportError
from rpcdist.own_shortage import LOOP_DESCRIPTORS, NO_THREAD
from rpcdist.rpc._executors.torch_state import StatefulCoroutine, adopt_num_threads
from rpcdist.rpc._values.exceptions import drop_first_frame, traceback_of
from rpcdist.time_limits import CLOSE_LIMIT_S, CLOSE_STEP_LIMIT_S, THREAD_GRACE_S
from rpcdist.transport import fork
from rpcdist.transport.io_loop import new_event_loop
from rpcdist.waiters import ends_within

T = TypeVar("T")
logger = logging.getLogger(__name__)

_WHAT: Final = "the event loop of user functions"
CANCEL_ROUNDS: Final = 3  # times that `close` cancels a coroutine, which may catch a cancellation by mistake


Start = Callable[[], Awaitable[object]]
OnDone = Callable[[object, BaseException | None], object]
"""Called with (result, None) or (None, error)."""


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class UserCall(Coroutine[Any, Any, None]):
    """A submitted coroutine: the submitter's handle, and the coroutine that the task runs."""

    _host: UserLoop
    _start: Start | None
    _on_done: OnDone | None
    deadline: Deadline
    context: Context | None
    name: str
    _coroutine: StatefulCoroutine[object] | None = None
    _end_reason: BaseException | None = None  # why the call was cancelled
    _task: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _is_over: bool = False

    def cancel(self) -> None:
        """Cancels the coroutine soon, unless it has ended; any thread, any number of times."""
        self._host.post(self.end_soon)

    def done(self) -> bool:
        return self._is_over

    def __repr__(self) -> str:
        state = "ended" if self._is_over else "waiting to start" if self._task is None else "running"
        return f"<UserCall {self.name} {state}, {self.deadline!r}>"

    # -- everything below: on the loop's thread ------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the task, or ends the call if its deadline has passed."""
        loop = self._host.loop
        if self._is_over:
            return
        if self.deadline.is_finite:
            left_s = self.deadline.remaining_s()
            if left_s <= 0:
                late = f"RPC ran for more than set timeout: the deadline passed before {self.name} started"
                self.end(None, DeadlineExceeded(late))
                return
            self._timer = loop.call_later(left_s, self._expire)
        context = Context() if self.context is None else self.context.copy()
        context.run(current_deadline.set, self.deadline)
        # Not via the task factory: this object swaps the state itself.
        self._task = asyncio.Task(self, loop=loop, name=self.name, context=context)

    def _expire(self) -> None:
        late = f"RPC ran for more than set timeout: {self.name} was cancelled at its caller's deadline"
        self.end_soon(DeadlineExceeded(late))

    def end_soon(self, reason: BaseException | None = None) -> None:
        """Cancels the coroutine; `on_done` gets the first `reason` given."""
        if self._is_over:
            return
        if self._end_reason is None:
            self._end_reason = reason or Cancelled(f"{self.name} was cancelled")
        if self._task is None:
            self.end(None, self._end_reason)
        else:
            self._task.cancel()

    def end(self, result: object, error: BaseException | None) -> None:
        """Calls `on_done`, once; the coroutine may still run afterwards."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if error is not None and issubclass(type(error), asyncio.CancelledError):
            error = self._end_reason or Cancelled(f"{self.name} raised asyncio.CancelledError without being cancelled")
        on_done = self._on_done
        self._on_done = self._start = self._coroutine = self._timer = None
        self._host.calls.discard(self)
        try:
            if on_done is not None:
                on_done(result, error)
        except BaseException:
            logger.exception("completing the call of %s failed", self.name)

    def send(self, value: Any, /) -> Any:
        try:
            if self._coroutine is None:
                if self._start is None:
                    raise StopIteration
                self._coroutine = StatefulCoroutine(_run(self._start))
            return self._coroutine.send(value)
        except BaseException as outcome:
            self._conclude(outcome)
        raise StopIteration

    def throw(self, *arguments: Any) -> Any:
        try:
            if self._coroutine is None:  # cancelled before its first step
                raise arguments[0]
            return self._coroutine.throw(*arguments)
        except BaseException as outcome:
            self._conclude(outcome)
        raise StopIteration

    def _conclude(self, outcome: BaseException) -> None:
        self._task = None  # it refers to this object
        if type(outcome) is StopIteration:  # one raised inside a coroutine becomes a RuntimeError
            self.end(outcome.value, None)
            return
        drop_first_frame(outcome)  # it belongs to this module
        self.end(None, outcome)

    def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("a UserCall is driven by its own task")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_") and self._coroutine is not None:
            return getattr(self._coroutine, name)
        raise AttributeError(name)


async def _run(start: Start) -> object:
    awaitable = start()
    if not isinstance(awaitable, Awaitable):
        raise TypeError(f"{start!r} returned {type(awaitable).__name__}, which is not awaitable")
    return await awaitable


class UserLoop:
    """An event loop on its own thread for the user's coroutines; the first coroutine starts both, or in Python 3.12
    `register_at_exit`."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_scheduled = False
        self.calls: set[UserCall] = set()
        self._refusal: Callable[[], Exception] | None = None
        self._stopping = False
        self._num_tasks_made = 0
        self._had_calls = False
        fork.register(self)

    def register_at_exit(self) -> None:
        """Has `close` run at exit; Python 3.12 cannot start threads then, and so starts the loop now."""
        register_at_exit(self.close)
        if STARTS_NO_THREAD:
            self._run_new_loop()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop; the first use starts it.

        Raises:
            NotInitialized: closed before it ever ran.
            ForkedProcess: the process is a forked child.
            TransportError: no descriptor or thread is left for the loop.
        """
        return self._loop or self._run_new_loop()

    def _run_new_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is not None:
                return self._loop
            if self._refusal is not None:
                raise self._refusal()
            loop = new_event_loop(_WHAT, LOOP_DESCRIPTORS)
            loop.set_task_factory(self._make_task)
            loop.set_exception_handler(_log_loop_error)
            thread = threading.Thread(target=self._work, args=(loop,), name="rpcdist-user-loop", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                loop.close()
                raise TransportError(f"{_WHAT} cannot start: {NO_THREAD}") from exc
            self._thread, self._loop = thread, loop
            return loop

    @property
    def ident(self) -> int | None:
        """The ident of the loop's thread; None before the loop starts."""
        return self._thread.ident if self._thread is not None else None

    def on_thread(self) -> bool:
        return threading.get_ident() == self.ident

    def __len__(self) -> int:
        return len(self.calls)

    def submit(
        self,
        start: Start,
        on_done: OnDone,
        deadline: Deadline = NEVER,
        context: Context | None = None,
        name: str | None = None,
    ) -> UserCall:
        """Runs the awaitable that `start()` returns; any thread, never waits.

        Args:
            start: called on the loop without arguments, usually a coroutine function.
            on_done: rule 2; must not block.
            deadline: cancels the coroutine, so that `on_done` gets `DeadlineExceeded`; the coroutine sees it as
                `current_deadline`.
            context: the coroutine runs in a copy; None for an empty one.
            name: name of the coroutine in messages; by default that of `start`.

        Raises:
            NotInitialized: the loop is closed.
            ForkedProcess: called in a forked child.
            TransportError: no descriptor or thread is left for the loop.
        """
        if self._refusal is not None:
            raise self._refusal()
        if self._loop is None:
            self._run_new_loop()
        shown = name or getattr(start, "__qualname__", None) or type(start).__qualname__
        call = UserCall(self, start, on_done, deadline, context, shown)
        self.calls.add(call)
        self._had_calls = True
        self.post(call.begin)
        return call

    def post(self, action: Callable[[], object]) -> None:
        """Runs `action` on the loop soon; any thread, never waits."""
        self._inbox.append(action)
        self._schedule()

    def _schedule(self) -> None:
        # The loop clears the flag before it reads the inbox, so it also reads what was appended while the flag was set.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._read_inbox)
            except RuntimeError:  # the loop is closed, and `close` ends all calls
                if self._thread is None or not self._thread.is_alive():
                    self._read_leftovers()

    def _read_inbox(self) -> None:
        self._is_scheduled = False
        inbox = self._inbox
        for _ in range(len(inbox)):
            try:
                action = inbox.popleft()
            except IndexError:
                return
            action()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        adopt_num_threads()
        try:
            while not self._stopping:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:  # from a task that user code started (rule 3)
                    logger.error("a task in user code raised this; the loop continues:\n%s", traceback_of(error))
            if not loop.run_until_complete(ends_within(loop.shutdown_asyncgens(), CLOSE_STEP_LIMIT_S)):
                logger.error("an async generator did not close within %.1f s", CLOSE_STEP_LIMIT_S)
        finally:
            loop.close()

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> list[str]:
        """Refuses new coroutines, cancels the running ones, and joins the thread; idempotent.

        Returns:
            Descriptions of the coroutines that did not end; they are also logged. Their submitters got `Cancelled`.
        """
        unregister_at_exit(self.close)
        with self._starting:
            if self._refusal is not None:
                return []
            self._refusal = NotInitialized
        deadline = Deadline.after(timeout_s)
        stubborn: list[str] = []
        thread = self._thread
        if thread is not None and thread.is_alive() and not self.on_thread():
            asyncio.run_coroutine_threadsafe(self._shut_down(deadline, stubborn), self.loop)
            thread.join(deadline.remaining_s() + THREAD_GRACE_S)
            if thread.is_alive():
                frame = sys._current_frames().get(self.ident or 0)
                stack = "" if frame is None else "".join(traceback.format_stack(frame, 12))
                stubborn.append(f"the loop's thread is blocked:\n{stack}")
        if stubborn:
            logger.error("the user loop was closed after %.1f s, but did not end:\n%s", timeout_s, "\n".join(stubborn))
        self._read_leftovers()
        return stubborn

    def _read_leftovers(self) -> None:
        for call in list(self.calls):
            call.end(None, Cancelled(f"the loop was closed before {call.name} ended"))

    async def _shut_down(self, deadline: Deadline, stubborn: list[str]) -> None:
        me = asyncio.current_task()
        self._read_inbox()
        # Skipped if this is the only task: asyncio searches the tasks of all loops, perhaps those of a thousand agents.
        tasks = asyncio.all_tasks() - {me} if self._had_calls or self._num_tasks_made > 1 else set()
        for left in range(CANCEL_ROUNDS, 0, -1):
            for call in list(self.calls):
                call.end_soon(Cancelled(f"{call.name} was cancelled because its worker is shutting down"))
            for task in tasks:
                task.cancel()
            if tasks:
                _, tasks = await asyncio.wait(tasks, timeout=deadline.remaining_s() / left)
        stubborn.extend(f"{task.get_name()} at {_where(task)}" for task in tasks)
        for call in list(self.calls):
            call.end(None, Cancelled(f"{call.name} did not end when it was cancelled"))
        self._stopping = True
        self.loop.stop()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,
    ) -> asyncio.Task[T]:
        """Makes a task for user code that starts with a copy of its creator's torch state (rule 1)."""
        self._num_tasks_made += 1
        if not isinstance(coroutine, (StatefulCoroutine, Generator)):
            coroutine = StatefulCoroutine(coroutine)
            coroutine.slot.copy_current()
        return asyncio.Task(coroutine, loop=loop, **options)

    def after_fork_in_child(self) -> None:
        """Forgets the thread and its calls: both stay in the parent."""
        self._refusal = ForkedProcess
        self._starting = threading.Lock()  # another thread of the parent may have held it
        self.calls = set()
        self._inbox = deque()
        unregister_at_exit(self.close)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    logger.error("on the user loop: %s\n%s", context.get("message"), "" if error is None else traceback_of(error))


def _where(task: asyncio.Task[Any]) -> str:
    """Returns the innermost line at which a task waits."""
    place = "an unknown place"
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None)
        inner = getattr(awaited, "cr_frame", None)
        if inner is not None and inner.f_code.co_filename == asyncio.tasks.__file__:
            break  # in asyncio.sleep or the like: the user's line that calls it says more
    return place
