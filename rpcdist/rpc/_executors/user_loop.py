"""The loop on which `async def` functions of the user run: one thread for any number of waiting handlers.

Rules:
 1. Every step of every coroutine runs with its own torch state (torch_state.py), those of tasks that user code starts
    included; between steps the thread has torch's initial state.
 2. `on_done` is called exactly once for each submission, when the coroutine has ended, also if it never began, on this
    loop's thread. (For what refuses to end, `close` calls it; then it may be another thread.)
 3. `SystemExit` and `KeyboardInterrupt` raised by user code are outcomes like others; they do not end the loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Final, Literal, TypeVar

from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.deadline import NEVER, Deadline
from rpcdist.errors import Cancelled, ConfigError, ForkedProcess, NotInitialized
from rpcdist.own_shortage import check_can_start
from rpcdist.rpc._executors.stateful_coroutine import StatefulCoroutine
from rpcdist.rpc._executors.torch_state import adopt_num_threads
from rpcdist.rpc._executors.user_call import OnDone, Start, UserCall
from rpcdist.rpc._values.exceptions import traceback_of
from rpcdist.time_limits import GENERATORS_LIMIT_S, LOOP_CLOSE_LIMIT_S, THREAD_GRACE_S
from rpcdist.transport import fork

T = TypeVar("T")
logger = logging.getLogger(__name__)

LoopKind = Literal["auto", "uvloop", "asyncio"]

CANCEL_ROUNDS: Final = 3  # `close` asks so often; a coroutine may catch a cancellation by mistake


class UserLoop:
    """An event loop on a thread of its own for coroutines of the user.

    Args:
        kind: "uvloop", "asyncio", or "auto" for uvloop where it is installed.
        name: name of the thread.
    """

    def __init__(self, kind: LoopKind = "auto", name: str = "rpcdist-user-loop") -> None:
        self.name = name
        self.loop = _new_loop(kind)
        self.loop.set_task_factory(self._make_task)
        self.loop.set_exception_handler(_log_loop_error)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_scheduled = False
        self._calls: set[UserCall] = set()
        self._refusal: Callable[[], Exception] | None = None
        self._stopping = False
        self._num_tasks_made = 0
        self._had_calls = False
        fork.register(self)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        register_at_exit(self.close)

    @property
    def ident(self) -> int | None:
        """Of its thread."""
        return self._thread.ident

    def on_thread(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.get_ident() == self._thread.ident

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return f"<UserLoop {type(self.loop).__module__} [{len(self._calls)} coroutines]>"

    def submit(
        self,
        start: Start,
        on_done: OnDone,
        deadline: Deadline = NEVER,
        context: Context | None = None,
        name: str | None = None,
    ) -> UserCall:
        """Runs what `start()` returns; any thread, never waits.

        Args:
            start: called on the loop with no argument, usually a coroutine function.
            on_done: rule 2; gets (result, None) or (None, error). It must not block.
            deadline: at it the coroutine is cancelled, and `on_done` gets `DeadlineExceeded`; it is `current_deadline`
                meanwhile.
            context: a copy of it is what the coroutine runs in; None is an empty one.
            name: name of the coroutine in messages; by default that of `start`.

        Raises:
            NotInitialized: the loop is closed.
            ForkedProcess: called in a forked child.
        """
        if self._refusal is not None:
            raise self._refusal()
        call = UserCall(self, start, on_done, deadline, context, name)
        self._calls.add(call)
        self._had_calls = True
        self.post(call.begin)
        return call

    def post(self, action: Callable[[], object]) -> None:
        """Runs `action` on the loop soon; any thread, never waits."""
        self._inbox.append(action)
        self._schedule()

    def forget(self, call: UserCall) -> None:
        """See `UserCallHost`."""
        self._calls.discard(call)

    def _schedule(self) -> None:
        # The loop clears the flag before it reads the inbox, so what was appended before the flag was seen set is read.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._read_inbox)
            except RuntimeError:  # the loop is closed: `close` has answered, or answers, everything
                if not self._thread.is_alive():
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

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        adopt_num_threads()
        try:
            while not self._stopping:
                try:
                    self.loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:  # of a task that user code started (rule 3)
                    logger.error("a task of user code ended; the loop goes on:\n%s", traceback_of(error))
            self.loop.run_until_complete(self._close_generators())
        finally:
            self.loop.close()

    async def _close_generators(self) -> None:
        try:
            async with asyncio.timeout(GENERATORS_LIMIT_S):
                await self.loop.shutdown_asyncgens()
        except TimeoutError:
            logger.error("an async generator did not end within %.1f s of being closed", GENERATORS_LIMIT_S)

    def close(self, timeout_s: float = LOOP_CLOSE_LIMIT_S) -> list[str]:
        """Takes no more coroutines, cancels what is left, and joins the thread; idempotent.

        Args:
            timeout_s: how long that may take, in seconds.

        Returns:
            What refused to end, as text for humans; it is logged, too. Its submitters got `Cancelled`.
        """
        unregister_at_exit(self.close)
        if self._refusal is not None:
            return []
        self._refusal = NotInitialized
        deadline = Deadline.after(timeout_s)
        stubborn: list[str] = []
        if self._thread.is_alive() and not self.on_thread():
            asyncio.run_coroutine_threadsafe(self._shut_down(deadline, stubborn), self.loop)
            self._thread.join(deadline.remaining_s() + THREAD_GRACE_S)
            if self._thread.is_alive():
                stubborn.append(f"the loop's thread is blocked:\n{self._stack()}")
        elif self._thread.ident is None:
            self.loop.close()
        if stubborn:
            logger.error("the user loop was closed after %.1f s, but did not end:\n%s", timeout_s, "\n".join(stubborn))
        self._read_leftovers()
        return stubborn

    def _read_leftovers(self) -> None:
        for call in list(self._calls):
            call.end(None, Cancelled(f"the loop was closed before {call.name} ended"))

    async def _shut_down(self, deadline: Deadline, stubborn: list[str]) -> None:
        me = asyncio.current_task()
        self._read_inbox()
        # Not if this is the only one: asyncio looks through the tasks of all loops, those of a thousand agents perhaps.
        tasks = asyncio.all_tasks() - {me} if self._had_calls or self._num_tasks_made > 1 else set()
        for left in range(CANCEL_ROUNDS, 0, -1):
            for call in list(self._calls):
                call.end_soon(Cancelled(f"{call.name} was cancelled because its worker shuts down"))
            for task in tasks:
                task.cancel()
            if tasks:
                _, tasks = await asyncio.wait(tasks, timeout=deadline.remaining_s() / left)
        stubborn.extend(f"{task.get_name()} at {_where(task)}" for task in tasks)
        for call in list(self._calls):
            call.end(None, Cancelled(f"{call.name} did not end when it was cancelled"))
        self._stopping = True
        self.loop.stop()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,
    ) -> asyncio.Task[T]:
        """Makes tasks that user code starts, which begin with a copy of the torch state of their creator (rule 1)."""
        self._num_tasks_made += 1
        if not isinstance(coroutine, (StatefulCoroutine, Generator)):
            coroutine = StatefulCoroutine(coroutine)
            coroutine.slot.copy_current()
        return asyncio.Task(coroutine, loop=loop, **options)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame, 12)) if frame is not None else ""

    def after_fork_in_child(self) -> None:
        """The thread stayed in the parent, and so did all that runs on it."""
        self._refusal = ForkedProcess
        self._calls = set()
        self._inbox = deque()
        unregister_at_exit(self.close)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    logger.error("on the user loop: %s\n%s", context.get("message"), "" if error is None else traceback_of(error))


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line that a task waits at."""
    place = "an unknown place"
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None)
        inner = getattr(awaited, "cr_frame", None)
        if inner is not None and inner.f_code.co_filename == asyncio.tasks.__file__:
            break  # in asyncio.sleep or the like: the line of the user that calls it says more
    return place


def _new_loop(kind: LoopKind) -> asyncio.AbstractEventLoop:
    if kind not in ("auto", "uvloop", "asyncio"):
        raise ConfigError(f"the kind of the user loop is 'auto', 'uvloop' or 'asyncio', but not {kind!r}")
    check_can_start("the event loop of user functions", starts_threads=False)
    if kind != "asyncio":
        try:
            import uvloop
        except ImportError as error:
            if kind == "uvloop":
                raise ConfigError("uvloop is not installed; `pip install uvloop`, or take 'asyncio'") from error
        else:
            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop
    return asyncio.SelectorEventLoop() if sys.platform != "win32" else asyncio.new_event_loop()
