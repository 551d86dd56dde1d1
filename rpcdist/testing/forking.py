"""The server process from which workers are forked: it has imported torch and rpcdist, and does nothing else.

Importing torch takes two seconds, forking a process that has done so takes milliseconds. Forking is safe there, because
the server never starts a thread. It is Python's own `multiprocessing` fork server, so there is one in a test process,
and it lives until that process ends.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

__all__ = ["context", "preload", "server_pid"]

_modules = ["__main__", "torch", "torch.utils.data", "rpcdist.rpc", "rpcdist.collectives", "rpcdist.collectives.tcp"]
_context = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Has the server import these modules as well; without effect once the first worker has started.

    A module that workers use and that takes long to import is worth it. It must start no thread when it is imported.
    """
    _modules.extend(modules)


def context() -> ForkServerContext:
    """The context to start workers with; starts the server."""
    server_pid()
    return _context


def server_pid() -> int:
    """The process from which the workers are forked; starts it when there is none. It outlives every test."""
    _context.set_forkserver_preload(_modules)
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP reads it once, when the server imports torch; workers share few cores
    try:
        forkserver.ensure_running()
    finally:
        if given is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = given
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public way
    return pid
