"""The worker's side: it handles one request after the other on its main thread, until the test's process ends.

A request is a number and a pickled (function, args, kwargs). The answer is the number, whether the function failed, and
the pickled value, or the pickled error and its traceback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rpcdist.errors import described_error


def pack(what: object) -> bytes:
    """Pickles a message; a connection's own `send` would move tensors into shared memory."""
    return pickle.dumps(what, 5)


unpack = pickle.loads


def serve(
    connection: Connection[Any, Any], lifeline: Connection[Any, Any], output: str, environment: Mapping[str, str]
) -> None:
    """Runs in the new process, and does not return.

    Args:
        lifeline: a pipe whose other end only the test's process holds.
    """
    _redirect_output(output)
    _die_with(lifeline)
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the workers of a test share few cores
    gc.freeze()  # the server's imports stay: each collection of them would take a fifth of a second
    with contextlib.suppress(EOFError, OSError):
        while True:
            _carry_out_next(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the test is over: a worker that was not shut down has no peers any more


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed worker loses no whole line
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _die_with(lifeline: Connection[Any, Any]) -> None:
    """Has the kernel kill this process and its forks when the test's process ends, even while it hangs in C.

    `PR_SET_PDEATHSIG` does not help: the parent is the fork server, which lives as long as its workers.
    """
    os.setpgid(0, 0)
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpid())  # the whole group
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:
        os._exit(0)  # it has ended already


def _carry_out_next(connection: Connection[Any, Any]) -> None:
    """Handles one request and keeps nothing: a worker holds only the objects that its functions stored."""
    connection.poll(None)
    number, packed = unpack(connection.recv_bytes())
    connection.send_bytes(pack((number, *_outcome_of(packed))))


def _outcome_of(packed: bytes) -> tuple[bool, bytes]:
    value: object
    try:
        has_failed, value = False, _call(packed)
    except BaseException as exc:
        has_failed, value = True, (exc, traceback.format_exc())
    try:
        return has_failed, pack(value)
    except Exception as exc:  # it cannot be pickled
        return True, pack((RuntimeError(f"{described_error(exc)} when sending {value!r}"), traceback.format_exc()))
    finally:
        del value  # or the error's traceback would keep this frame, and through it the error, alive


def _call(packed: bytes) -> object:
    call: tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]] = unpack(packed)
    function, args, kwargs = call
    return function(*args, **kwargs)
