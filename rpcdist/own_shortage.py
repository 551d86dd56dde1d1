"""What this process lacks itself, so that its attempts fail whatever others do: that is a verdict about nobody else.

Libraries report a shortage in many ways. So what an error says of it counts where the system has said it; else it is
tried whether a descriptor and a port can be had at all.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rpcdist.errors import RpcdistError, TransportError
from rpcdist.time_limits import MIN_ATTEMPT_S, SHORTAGE_LOG_PERIOD_S

logger = logging.getLogger(__name__)

NO_THREAD: Final = "this process can start no further thread (ulimit -u, or the pids limit of its container): raise it"
_NO_PORT: Final = (
    "this process has no free local port (net.ipv4.ip_local_port_range): close connections, or widen the range"
)
_NO_MEMORY: Final = "this process gets no more memory from the system: free some, or raise its limit"
START_DESCRIPTORS: Final = 32
"""What event loops, gRPC's poller, listeners and first connections take when a process starts. Measured: 22 to 28."""

START_THREADS: Final = 8
"""What these start as threads, most of them gRPC's own. Measured: 7."""

DESCRIPTORS_FOR_EACH_PEER: Final = 4
"""Of rank 0: a connection each way, the bell of one that a thread has led, and one to its store while a world forms."""

_MOST_DESCRIPTORS: Final = 1 << 20  # a soft limit without bounds slows down programs that close all they might have
_NONE_FREE: Final = "no free file descriptor"
_MOST_CAUSES: Final = 10  # of an exception; they may form a circle

_log_lock = threading.Lock()
_logged: dict[str, float] = {}  # when, in seconds of the monotonic clock
_raised: list[int] = []  # what the soft limit was before


def own_shortage(exc: BaseException | None = None) -> str | None:
    """What this process lacks, and what to do, for the text of an error; logged once a minute. None: nothing is short.

    Args:
        exc: an attempt to connect that failed, perhaps because of it; None: only descriptors are looked at, which
            takes a few microseconds.
    """
    shortage = next(filter(None, map(_said_by, _causes(exc))), None) or _found(looks_at_ports=exc is not None)
    if shortage is not None and _is_due(shortage):
        logger.warning(
            "%s. Until then what needs it fails here, and no worker counts as lost because of that", shortage
        )
    return shortage


def raise_descriptor_limit() -> None:
    """Raises the soft limit of descriptors to the hard one, once in a process: the usual 1,024 suit no rank 0."""
    with _log_lock:
        if _raised:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        _raised.append(soft)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox forbids it: then the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_descriptors_for(num_peers: int) -> None:
    """Looks whether rank 0 of a world may have the descriptors that its peers will take.

    Raises:
        TransportError: it may not; the text has both numbers.
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
            f"{DESCRIPTORS_FOR_EACH_PEER} for each of the others), and this process may have {limit}: raise its hard "
            "limit (ulimit -Hn)"
        )


def try_for_descriptor() -> None:
    """Raises `OSError` if this process can have no socket now; gRPC's error for that is made of unset memory."""
    socket.socket().close()


def check_can_start(what: str, starts_threads: bool = True) -> None:
    """Looks whether there are descriptors and threads for something that is about to start.

    uvloop aborts the process where it gets no descriptor for a new loop, and gRPC crashes where it gets none for its
    poller, or no thread.

    Args:
        what: what cannot start otherwise, for the text.
        starts_threads: whether it has several, which may not be missing half-way.

    Raises:
        TransportError: fewer than `START_DESCRIPTORS` are free, or fewer than `START_THREADS` can be started.
    """
    _check_descriptors(what)
    if starts_threads:
        _check_threads(what)


def _check_descriptors(what: str) -> None:
    held: list[int] = []
    try:
        while len(held) < START_DESCRIPTORS:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        shortage = _of_number(exc.errno, len(held))
        if shortage is None:
            raise
        raise TransportError(f"{what} cannot start: {shortage}") from exc
    finally:
        for descriptor in held:
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
    """Turns what the system and libraries raise in a shortage of this process into an error that names it.

    Args:
        what: what failed because of it, for the text.
        error: the class of the new error, whose constructor takes the text.

    Raises:
        TransportError, or `error`: the shortage. Errors of this package, and those that name no shortage, pass
            unchanged.
    """
    try:
        yield
    except RpcdistError:
        raise
    except (OSError, MemoryError, RuntimeError) as exc:
        shortage = next(filter(None, map(_said_by, _causes(exc))), None)
        if shortage is None:
            raise
        raise error(f"{what} failed: {shortage}") from exc


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_MOST_CAUSES):
        if exc is None:
            return
        yield exc
        exc = exc.__cause__


def _said_by(exc: BaseException) -> str | None:
    if isinstance(exc, MemoryError):
        return _NO_MEMORY
    if isinstance(exc, OSError):
        return _of_number(exc.errno)
    return NO_THREAD if isinstance(exc, RuntimeError) and "can't start new thread" in str(exc) else None


def _of_number(number: int | None, num_free: int = 0) -> str | None:
    free = f"only {num_free} free file descriptors of the {START_DESCRIPTORS} that it needs" if num_free else _NONE_FREE
    if number == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has {free} (ulimit -n is {limit}): close files, or raise the limit"
    if number == errno.ENFILE:
        return f"this machine has {free} (fs.file-max): close files, or raise the limit"
    return _NO_MEMORY if number in (errno.ENOMEM, errno.ENOBUFS) else None


def _found(looks_at_ports: bool) -> str | None:
    try:
        with socket.socket() as probe:
            if looks_at_ports:
                probe.bind(("", 0))
    except OSError as exc:
        return _NO_PORT if exc.errno == errno.EADDRINUSE else _of_number(exc.errno)
    return None


def _is_due(shortage: str) -> bool:
    now = time.monotonic()
    with _log_lock:
        is_due = now - _logged.get(shortage, float("-inf")) >= SHORTAGE_LOG_PERIOD_S
        if is_due:
            _logged[shortage] = now
    return is_due
