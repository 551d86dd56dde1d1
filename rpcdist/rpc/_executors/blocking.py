"""The pool's threads, `blocking()` to mark a wait so that the pool can add a thread, and guards against blocking in an
event loop: `off_loop` refuses to run there and names the asynchronous form, which `async_form` makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

from rpcdist.errors import BlockingInLoop
from rpcdist.rpc._executors.torch_state import StateSlot
from rpcdist.transport.io_loop import unblock_signals
from rpcdist.waiters import run_in_thread

Hook = Callable[[], object]


def new_baton() -> LockType:
    """Returns an acquired lock: a thread parks by acquiring it, and a release wakes the thread.

    Each thread has its own; a shared condition would wake several threads for one job, which would then contend for it.
    """
    baton = allocate_lock()
    baton.acquire()
    return baton


class WorkerThread:
    """The state of one thread of the pool.

    Attributes:
        baton: the lock that the thread parks on.
        ended: a lock held until the thread has left the pool.
        blocked: how many `blocking` blocks the thread is in.
        is_lent: whether the thread is lent, and so not part of the pool now.
    """

    __slots__ = ("_clock", "arguments", "baton", "blocked", "ended", "is_lent", "job", "thread")

    def __init__(self, work: Callable[[WorkerThread], object], name: str) -> None:
        self.baton = new_baton()
        self.ended = new_baton()
        self.job: Callable[..., object] | None = None
        self.arguments: tuple[object, ...] = ()
        self.blocked = 0
        self.is_lent = False
        self._clock: int | None = None
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)

    def begin(self) -> None:
        """Must run on the thread itself: asking for the clock of a thread that has ended may crash the process."""
        unblock_signals()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def cpu_s(self) -> float:
        """CPU time that the thread has used, in seconds; 0 if unknown."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return 0.0


class _ThreadHooks(threading.local):
    """Functions to call before and after a wait on this thread; None outside a pool.

    `reads_jobs` is set while a pool thread reads its next job; `worker` is the state of a pool thread.
    """

    enter: Hook | None = None
    leave: Hook | None = None
    reads_jobs: bool = False
    worker: WorkerThread | None = None


hooks = _ThreadHooks()


def set_hooks(enter: Hook, leave: Hook) -> None:
    """Makes each `blocking` block of this thread, nested ones included, call `enter` and `leave`."""
    hooks.enter, hooks.leave = enter, leave


def forget_hooks() -> None:
    hooks.enter = hooks.leave = hooks.worker = None


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """Inside, this thread does not count as running, so the pool may run another one at once."""
    enter, leave = hooks.enter, hooks.leave
    if enter is None or leave is None:
        yield
        return
    enter()
    try:
        yield
    finally:
        leave()


P = ParamSpec("P")
R = TypeVar("R")


def check_off_loop(what: str, instead: str) -> None:
    """Raises `BlockingInLoop` on the thread of a running event loop; `instead` is what to write there."""
    if asyncio._get_running_loop() is not None:
        raise BlockingInLoop(what, instead)


def off_loop(instead: str, what: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a blocking function raise `BlockingInLoop`, before it does anything, if an event loop runs on this thread.

    Args:
        instead: what to write there, for example "await server.step_async(...)".
        what: the name for the error, if users know the function by another one.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if asyncio._get_running_loop() is not None:
                raise BlockingInLoop(what or function.__qualname__.removesuffix(".__init__"), instead)
            return function(*args, **kwargs)

        return checked

    return mark


def async_form(function: Callable[P, R], ends_waits: bool = False) -> Callable[P, Coroutine[Any, Any, R]]:
    """Returns a coroutine function that runs `function` on a new thread.

    The function sees the task's context variables, autograd context included, and its torch state (`no_grad`). If the
    task is cancelled, the function keeps running until its own time limit, and its result is dropped.

    Args:
        ends_waits: whether a cancellation ends the waits of the function instead, as in `run_in_thread`.
    """
    is_method = "." in function.__qualname__

    @functools.wraps(function)
    async def form(*args: P.args, **kwargs: P.kwargs) -> R:
        # A subclass may override the method.
        found = partial(getattr(args[0], function.__name__), *args[1:]) if is_method else partial(function, *args)
        state = StateSlot()
        state.copy_current()
        return await run_in_thread(
            partial(state.call, partial(found, **kwargs)), lambda: None, f"rpcdist-{function.__name__}", ends_waits
        )

    form.__name__, form.__qualname__ = f"{function.__name__}_async", f"{function.__qualname__}_async"
    cancelled = "ends" if ends_waits else "keeps running there"
    form.__doc__ = f"`{function.__name__}` for coroutines, on a thread; {cancelled} if the task is cancelled."
    return form
