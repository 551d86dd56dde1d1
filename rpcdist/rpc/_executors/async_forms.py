"""The asynchronous forms of functions that block: `step_async` of `step`, and the error that names it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

from rpcdist.errors import BlockingInLoop
from rpcdist.rpc._executors.torch_state import StateSlot
from rpcdist.waiters import run_in_thread

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
