"""The actions of this package at the end of the process, after the program's own `atexit` callbacks.

[Note: after atexit] `atexit` calls what was registered last first. A part that registered when it started would end
before `atexit.register(rpc.shutdown)` of a program that registered that earlier: peers would see a worker that died.
CPython frees the callbacks after it has called the last of them, while other threads still run. An object that only an
`atexit` callback refers to is freed exactly then, whenever it was registered.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from rpcdist.at_end import AtEnd

logger = logging.getLogger(__name__)

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


def unregister_at_exit(action: Callable[[], object]) -> None:
    """Takes back what was registered, if it was."""
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
        except BaseException:  # Ctrl-C, too: what is left has to end all the same
            logger.exception("what ends with the process failed: %r", action)
