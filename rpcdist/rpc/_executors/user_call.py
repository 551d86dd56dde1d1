"""One coroutine on the user loop: the handle of its submitter, and the code that its task runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from types import TracebackType
from typing import Any, Protocol, overload

from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import Cancelled, DeadlineExceeded
from rpcdist.rpc._executors.stateful_coroutine import StatefulCoroutine
from rpcdist.rpc._values.exceptions import drop_first_frame

logger = logging.getLogger(__name__)

Start = Callable[[], Awaitable[object]]
OnDone = Callable[[object, BaseException | None], object]
"""Gets the result, or None and the error."""


class UserCallHost(Protocol):
    """The loop, as a call that runs on it sees it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def post(self, action: Callable[[], object]) -> None:
        """Runs `action` on the loop soon; any thread."""

    def forget(self, call: UserCall) -> None:
        """The call has ended."""


class UserCall(Coroutine[Any, Any, None]):
    """One submission: its handle for the submitter, and the coroutine of its task."""

    __slots__ = (
        "__weakref__",
        "_coroutine",
        "_end_reason",
        "_host",
        "_is_over",
        "_on_done",
        "_start",
        "_task",
        "_timer",
        "context",
        "deadline",
        "name",
    )

    def __init__(
        self,
        host: UserCallHost,
        start: Start,
        on_done: OnDone,
        deadline: Deadline,
        context: Context | None,
        name: str | None,
    ) -> None:
        self._host = host
        self._start: Start | None = start
        self._on_done: OnDone | None = on_done
        self.deadline = deadline
        self.context = context
        self.name = name or getattr(start, "__qualname__", None) or type(start).__qualname__
        self._coroutine: StatefulCoroutine[object] | None = None
        self._end_reason: BaseException | None = None  # why it was cancelled
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def cancel(self) -> None:
        """Cancels the coroutine soon, unless it has ended; any thread, any number of times."""
        self._host.post(self.end_soon)

    def done(self) -> bool:
        """Whether `on_done` was called."""
        return self._is_over

    def __repr__(self) -> str:
        state = "ended" if self._is_over else "waiting to start" if self._task is None else "running"
        return f"<UserCall {self.name} {state}, {self.deadline!r}>"

    # -- everything below: on the loop's thread ------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts the task, or ends at once where the deadline is over already."""
        loop = self._host.loop
        if self._is_over:
            return
        if self.deadline.is_finite:
            left_s = self.deadline.remaining_s()
            if left_s <= 0:
                late = f"RPC ran for more than set timeout: it was over before {self.name} ran"
                self.end(None, DeadlineExceeded(late))
                return
            self._timer = loop.call_later(left_s, self._expire)
        context = Context() if self.context is None else self.context.copy()
        context.run(current_deadline.set, self.deadline)
        # Not through the task factory: this object swaps the state itself.
        self._task = asyncio.Task(self, loop=loop, name=self.name, context=context)

    def _expire(self) -> None:
        late = f"RPC ran for more than set timeout: {self.name} ran longer than its caller waits, and was cancelled"
        self.end_soon(DeadlineExceeded(late))

    def end_soon(self, reason: BaseException | None = None) -> None:
        """Cancels the coroutine; `on_done` gets `reason`. The first reason stays."""
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
            error = self._end_reason or Cancelled(f"{self.name} ended with asyncio.CancelledError of its own making")
        on_done = self._on_done
        self._on_done = self._start = self._coroutine = self._timer = None
        self._host.forget(self)
        try:
            if on_done is not None:
                on_done(result, error)
        except BaseException:
            logger.exception("the completion of %s failed", self.name)

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

    @overload
    def throw(
        self, kind: type[BaseException], error: object = None, traceback: TracebackType | None = None, /
    ) -> Any: ...
    @overload
    def throw(self, error: BaseException, none: None = None, traceback: TracebackType | None = None, /) -> Any: ...
    def throw(self, *arguments: Any) -> Any:
        try:
            if self._coroutine is None:  # cancelled before its first step
                raise arguments[0]
            return self._coroutine.throw(*arguments)
        except BaseException as outcome:
            self._conclude(outcome)
        raise StopIteration

    def _conclude(self, outcome: BaseException) -> None:
        if type(outcome) is StopIteration:  # a coroutine that raises one has a RuntimeError made of it
            self.end(outcome.value, None)
            return
        drop_first_frame(outcome)  # this module's explain nothing
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
        raise TypeError(f"{start!r} returned {type(awaitable).__name__}, which cannot be awaited")
    return await awaitable
