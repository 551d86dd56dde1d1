"""Actions at the end of an object, and at the end of the process after the program's own `atexit` callbacks.

[Note: Ctrl-C in finalizers] Python runs signal handlers between any two instructions of the main thread, including
those of a `__del__`, and discards exceptions of a finalizer. A Ctrl-C that arrives there is lost, and the rest of the
finalizer does not run: a reference would never be released. `try` does not help, since Python checks for signals before
it. A finalizer that is written in C, and calls only C, has no such gap. Callbacks of weak references would also do, but
the collector runs them before any `__del__`, which may still use the objects that they report as freed.

[Note: after atexit] `atexit` calls the last registered callback first. A part that registered when it started would end
before `atexit.register(rpc.shutdown)` of a program that registered that earlier, and peers would see a dead worker.
CPython frees the callbacks after it has called the last of them, while other threads still run. An object that only an
`atexit` callback refers to is freed exactly then, independent of the time of its registration.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final


class AtEnd(partial[object]):
    """Calls its function, with its arguments, when it is freed: `self._at_end = AtEnd(queue.append, item)`.

    The function must be written in C, like `deque.append`, and be safe on any thread at any moment. If the collector
    frees several objects together, it runs like any `__del__`, usually in the order in which the objects were made.
    [Note: Ctrl-C in finalizers]
    """

    __slots__ = ()
    __del__ = partial.__call__

    def __reduce__(self) -> Any:
        raise TypeError("an AtEnd acts once, at the end of an object, and cannot be copied or pickled")


logger = logging.getLogger(__name__)

STARTS_NO_THREAD: Final = sys.version_info[:2] == (3, 12)
"""Whether `atexit` callbacks cannot start threads in this Python: the threads that `shutdown` needs must run before."""

AFTER_ALL_FINALIZERS: Final = -1000  # `multiprocessing` calls finalizers of a lower priority later

_actions: list[Callable[[], object]] = []
_armed_in = 0
"""The process whose end calls the actions. A forked child inherits the list, and calls it once it registers more."""


def register_at_exit(action: Callable[[], object]) -> None:
    """Has `action` called at the end of this process, before those registered earlier; any thread."""
    global _armed_in
    _actions.append(action)
    if _armed_in != os.getpid():
        _armed_in = os.getpid()
        _arm(os.getpid())


def ending_error() -> BaseException | None:
    """Returns the error that this thread handles, as in a `finally`, or with which the program ends; None without one.

    Actions at exit call it. In an interactive interpreter, whose errors do not end it, only the first kind counts.
    """
    error = sys.exception()
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)  # set when the interpreter prints the error that ends the program
    return error if isinstance(error, Exception | KeyboardInterrupt) else None


def unregister_at_exit(action: Callable[[], object]) -> None:
    """Removes a registered action, if it is registered."""
    while action in _actions:
        _actions.remove(action)


def _arm(pid: int) -> None:
    atexit.register(_hold, AtEnd(_run, pid))
    multiprocessing: Any = sys.modules.get("multiprocessing")
    is_child = multiprocessing is not None and multiprocessing.parent_process() is not None
    if is_child and sys.version_info < (3, 13) and multiprocessing.get_start_method(True) != "spawn":
        # Such a child ends without `atexit`. In others the callbacks of `atexit` come after these finalizers.
        multiprocessing.util.Finalize(None, _run, (pid,), exitpriority=AFTER_ALL_FINALIZERS)


def _hold(at_end: AtEnd) -> None:
    """Keeps the object until `atexit` drops its callbacks. [Note: after atexit]"""


def _run(pid: int) -> None:
    while os.getpid() == pid and _actions:
        action = _actions.pop()
        try:
            action()
        except BaseException:  # including Ctrl-C: the other actions must still run
            logger.exception("an action at the end of the process failed: %r", action)
