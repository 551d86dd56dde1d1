"""Detects shortages of this process, such as missing descriptors, which say nothing about other processes.

Libraries report a shortage in many ways. If the system's own error does not name it, this module tries to get a
descriptor and a port.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rpcdist.errors import RpcdistError, TransportError
from rpcdist.time_limits import LOG_PERIOD_S, MIN_ATTEMPT_S

logger = logging.getLogger(__name__)

NO_THREAD: Final = (
    "this process can start no more threads: raise ulimit -u, ulimit -v, or the pids limit of its container"
)
_NO_PORT: Final = (
    "this process has no free local port (net.ipv4.ip_local_port_range): close connections, or widen the range"
)
_NO_MEMORY: Final = "the system gives this process no more memory: free some, or raise its limit"
START_DESCRIPTORS: Final = 32
"""Descriptors for event loops, gRPC's poller, listeners and first connections when a process starts; 22 to 28 are used.
"""

LOOP_DESCRIPTORS: Final = 12
"""Descriptors for one more event loop in a process that runs already; 7 to 9 are used."""

START_THREADS: Final = 8
"""Threads that these start, most of them gRPC's own; 7 are used."""

DESCRIPTORS_FOR_EACH_PEER: Final = 4
"""Descriptors of rank 0 for each worker: a connection each way, the bell of one of them, and a connection to the store
while a world forms."""

_MAX_DESCRIPTORS: Final = 1 << 20  # an unlimited soft limit slows down programs that close all possible descriptors
_NONE_FREE: Final = "no free file descriptor"
_MAX_CAUSES: Final = 10  # causes of an exception, which may form a circle

_log_lock = threading.Lock()
_logged: dict[str, float] = {}  # time of the log line, in seconds of the monotonic clock
_raised: list[int] = []  # the earlier soft limit


def keep_newest(most: int) -> Callable[[Callable[[], bool], Callable[[], object]], None]:
    """Bounds the connections of a server to which anybody may connect; each takes a descriptor, and some a thread.

    Returns:
        A function to call for each new connection, with a function that returns whether it is open, and one that ends
        it. It ends the oldest connection if more than `most` are open. It is not thread-safe.
    """
    newest: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    def add(is_open: Callable[[], bool], end: Callable[[], object]) -> None:
        newest[:] = [one for one in newest if one[0]()]
        newest.append((is_open, end))
        if len(newest) > most:
            with suppress(OSError):  # it has ended
                newest.pop(0)[1]()

    return add


def own_shortage(exc: BaseException | None = None) -> str | None:
    """The shortage of this process and advice, for the text of an error; logged once a minute. None for no shortage.

    Args:
        exc: the error of an attempt to connect. With None, this checks only descriptors, in a few microseconds.
    """
    shortage = next(filter(None, map(_shortage_named_by, _causes(exc))), None) or _probed_shortage(
        with_port=exc is not None
    )
    if shortage is not None and _is_due(shortage):
        logger.warning(
            "%s. Until then, operations that need it fail in this process, but no worker is declared lost for that",
            shortage,
        )
    return shortage


def raise_descriptor_limit() -> None:
    """Raises the soft limit on descriptors to the hard one, once in a process: rank 0 needs more than usual."""
    with _log_lock:
        if _raised:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        _raised.append(soft)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may forbid it; the limit then stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_descriptors_for(num_peers: int) -> None:
    """Checks that rank 0 of a world may open enough descriptors for its peers.

    Raises:
        TransportError: the limit is too low; the text has both numbers.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:
        num_open = START_DESCRIPTORS
    needed = num_open + DESCRIPTORS_FOR_EACH_PEER * num_peers
    if limit not in (resource.RLIM_INFINITY, -1) and needed > limit:
        raise TransportError(
            f"rank 0 of a world of {num_peers + 1} workers needs {needed} file descriptors ({num_open} are open, and "
            f"{DESCRIPTORS_FOR_EACH_PEER} for each of the others), but this process may have only {limit}: raise its "
            "hard limit (ulimit -Hn)"
        )


def free_memory() -> str:
    """The memory that this process can have now, as a clause: of the machine, or of its own limit if that is less."""
    free_bytes, limit = (
        os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize(),
        resource.getrlimit(resource.RLIMIT_AS)[0],
    )
    with suppress(OSError), open("/proc/self/statm") as file:
        left_bytes = limit - int(file.read().split()[0]) * resource.getpagesize()
        if limit != resource.RLIM_INFINITY and left_bytes < free_bytes:
            return f"{max(0, left_bytes)} bytes are free in this process (ulimit -v is {limit >> 10})"
    return f"{free_bytes} bytes are free"


def try_for_descriptor() -> None:
    """Raises `OSError` if this process cannot open a socket now; gRPC's own error for that has uninitialised text."""
    socket.socket().close()


def check_can_start(what: str, starts_threads: bool = True, num_descriptors: int = START_DESCRIPTORS) -> None:
    """Checks that there are descriptors and threads for a part that is about to start.

    uvloop aborts the process if it gets no descriptor for a new loop, and gRPC crashes if it gets no descriptor for its
    poller, or no thread. uvloop also aborts it when it closes a descriptor from 0 to 2, which would be its own in a
    process without standard streams (`python job.py <&-`): those are opened on `os.devnull`.

    Args:
        what: the name of the part, for the text.
        starts_threads: whether the part starts several threads, none of which may fail half-way.
        num_descriptors: how many it needs.

    Raises:
        TransportError: fewer descriptors are free, or fewer than `START_THREADS` threads can be started.
    """
    _check_descriptors(what, num_descriptors)
    if starts_threads:
        _check_threads(what)


def _check_descriptors(what: str, num_descriptors: int) -> None:
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        while len(held) < num_descriptors:
            held.append(os.dup(held[0]))
    except OSError as exc:
        free = f"only {len(held)} free file descriptors of the {num_descriptors} that it needs" if held else _NONE_FREE
        shortage = _shortage_of_errno(exc.errno, free)
        if shortage is None:
            raise
        raise TransportError(f"{what} cannot start: {shortage}") from exc
    finally:
        for descriptor in held:
            if descriptor > 2:  # it stays if it replaces a closed standard stream
                os.close(descriptor)


def _check_threads(what: str) -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, args=(MIN_ATTEMPT_S,), daemon=True) for _ in range(START_THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as exc:
        raise TransportError(f"{what} cannot start: {NO_THREAD}") from exc
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


@contextmanager
def names_shortage(what: str, error: type[RpcdistError] = TransportError) -> Iterator[None]:
    """Turns errors of the system and of libraries that a shortage of this process caused into one that names it.

    Args:
        what: the operation that failed, for the text.
        error: the class of the new error, whose constructor takes the text.

    Raises:
        TransportError, or `error`: the shortage. Errors of this package, and errors without a shortage, pass unchanged.
    """
    try:
        yield
    except RpcdistError:
        raise
    except (OSError, MemoryError, RuntimeError) as exc:
        shortage = next(filter(None, map(_shortage_named_by, _causes(exc))), None)
        if shortage is None:
            raise
        raise error(f"{what} failed: {shortage}") from exc


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MAX_CAUSES):
        if exc is None:
            return
        yield exc
        exc = exc.__cause__


def _shortage_named_by(exc: BaseException) -> str | None:
    if isinstance(exc, MemoryError):
        return _NO_MEMORY
    if isinstance(exc, OSError):
        return _shortage_of_errno(exc.errno)
    return NO_THREAD if isinstance(exc, RuntimeError) and "can't start new thread" in str(exc) else None


def _shortage_of_errno(number: int | None, free: str = _NONE_FREE) -> str | None:
    if number == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has {free} (ulimit -n is {limit}): close files, or raise the limit"
    if number == errno.ENFILE:
        return f"this machine has {free} (fs.file-max): close files, or raise the limit"
    return _NO_MEMORY if number in (errno.ENOMEM, errno.ENOBUFS) else None


def _probed_shortage(with_port: bool) -> str | None:
    try:
        with socket.socket() as probe:
            if with_port:
                probe.bind(("", 0))
    except OSError as exc:
        return _NO_PORT if exc.errno == errno.EADDRINUSE else _shortage_of_errno(exc.errno)
    return None


def _is_due(shortage: str) -> bool:
    now = time.monotonic()
    with _log_lock:
        is_due = now - _logged.get(shortage, float("-inf")) >= LOG_PERIOD_S
        if is_due:
            _logged[shortage] = now
    return is_due
