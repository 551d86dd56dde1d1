"""A thread of the worker pool, and how code that is about to wait says so, wherever it runs.

The pool then counts the thread as free to be replaced. On the thread of an event loop such code is refused: the error
names its asynchronous form, `step_async` of `step`, which is made here.
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
from typing import Any, Final, ParamSpec, TypeVar

from rpcdist.errors import BlockingInLoop
from rpcdist.rpc._executors.torch_state import StateSlot
from rpcdist.transport.io_loop import unblock_signals
from rpcdist.waiters import run_in_thread

Hook = Callable[[], object]
HAS_THREAD_CLOCK: Final = hasattr(time, "pthread_getcpuclockid")


def new_baton() -> LockType:
    """A lock that is held from the beginning: a thread parks by acquiring it, and a release wakes the thread.

    One per thread: a condition that all share would wake several for one job, and each wake-up would contend for it.
    """
    baton = allocate_lock()
    baton.acquire()
    return baton


class WorkerThread:
    """The state of one thread of the pool.

    Attributes:
        thread: the thread; `work` is what it runs, and gets this object.
        baton: the thread parks on it.
        ended: held until the thread has left the pool.
        job: what it runs now, or None.
        blocked: how many `blocking` blocks it is in.
        is_lent: it does not belong to the pool for now.
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
        """The thread calls it first, itself: asking for the clock of a thread that has ended may crash the process."""
        unblock_signals()
        if HAS_THREAD_CLOCK:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def cpu_s(self) -> float:
        """Processor time that the thread has used, in seconds; 0 where the system does not tell."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return 0.0


class _ThreadHooks(threading.local):
    """The functions to call around a wait on this thread; None on threads that belong to no pool.

    `reads_jobs` is set while a pool's thread reads its next job; `worker` is what the pool knows of its thread.
    """

    enter: Hook | None = None
    leave: Hook | None = None
    reads_jobs: bool = False
    worker: WorkerThread | None = None


hooks = _ThreadHooks()


def set_hooks(enter: Hook, leave: Hook) -> None:
    """Has `enter` and `leave` called around each `blocking` block of this thread, nested ones included."""
    hooks.enter, hooks.leave = enter, leave


def forget_hooks() -> None:
    """Undoes `set_hooks` for this thread."""
    hooks.enter = hooks.leave = hooks.worker = None


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """While it lasts, this thread does not count as running, so that another one may run immediately."""
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


def off_loop(instead: str, what: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function that blocks: on the thread of an event loop it raises `BlockingInLoop`, and has done nothing.

    Args:
        instead: what can be written there, for example "await server.step_async(...)".
        what: the function's name for the error, where users know it by another one.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if asyncio._get_running_loop() is not None:
                raise BlockingInLoop(what or function.__qualname__.removesuffix(".__init__"), instead)
            return function(*args, **kwargs)

        return checked

    return mark


def async_form(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The same for coroutines: it runs on a thread of its own, and the event loop goes on.

    It sees the context of the task, an autograd context included, and torch's state of the thread (`no_grad`). When the
    task is cancelled, it goes on beside it until its own limit, and its result is dropped.
    """
    is_method = "." in function.__qualname__

    @functools.wraps(function)
    async def form(*args: P.args, **kwargs: P.kwargs) -> R:
        # The method of a subclass, where there is one.
        found = partial(getattr(args[0], function.__name__), *args[1:]) if is_method else partial(function, *args)
        state = StateSlot()
        state.copy_current()
        return await run_in_thread(
            partial(state.call, partial(found, **kwargs)), lambda: None, f"rpcdist-{function.__name__}"
        )

    form.__name__, form.__qualname__ = f"{function.__name__}_async", f"{function.__qualname__}_async"
    form.__doc__ = f"`{function.__name__}` for coroutines, on a thread; it goes on there if the task is cancelled."
    return form
