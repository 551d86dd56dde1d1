"""Lets code that is about to wait say so, wherever it runs: the pool then counts its thread as free to be replaced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

__all__ = ["blocking", "forget_hooks", "hooks", "set_hooks"]

Hook = Callable[[], object]


class _ThreadHooks(threading.local):
    """What to call around a wait on this thread; None on threads that belong to no pool."""

    enter: Hook | None = None
    leave: Hook | None = None


hooks = _ThreadHooks()


def set_hooks(enter: Hook, leave: Hook) -> None:
    """Has `enter` and `leave` called around each `blocking` block of this thread, nested ones included."""
    hooks.enter, hooks.leave = enter, leave


def forget_hooks() -> None:
    """Undoes `set_hooks` for this thread."""
    hooks.enter = hooks.leave = None


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """While it lasts, this thread does not count as running, so that another may take its place at once."""
    enter, leave = hooks.enter, hooks.leave
    if enter is None or leave is None:
        yield
        return
    enter()
    try:
        yield
    finally:
        leave()
