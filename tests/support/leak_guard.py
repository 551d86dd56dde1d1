"""Finds what a test leaves behind: threads, child processes, listening sockets, shared memory, errors on a loop.

A clean test costs a few listings of /proc. Only when something new is there does the guard look closer, and then gives
it a moment to end, since a closed connection or a joined pool ends its last threads a little later.

Linux only: elsewhere the guard finds threads and loop errors, and nothing else.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

__all__ = ["GRACE_S", "LeakGuard", "Snapshot", "loop_errors"]

GRACE_S = 20.0  # of a test that leaves something; on a busy machine, what ends by itself takes seconds
POLL_S = 0.01

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The resources of a process at one moment; each by a name that is not used again soon."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    sockets: frozenset[str]
    segments: frozenset[str]


class LeakGuard:
    """Compares what this process holds before and after a test.

    Worker processes and threads that outlive a test on purpose are named by `exempt_child` and `exempt_thread`.
    Resources that exist before the test's own fixtures run are never counted, so most pools of module or session scope
    need neither.
    """

    def __init__(self) -> None:
        self._exempt_children: set[int] = set()
        self._exempt_threads: set[threading.Thread] = set()
        self._thread_owners: list[Callable[[], Collection[threading.Thread]]] = []

    def exempt_child(self, pid: int) -> None:
        """Process `pid`, a child of this one, and the processes below it may stay."""
        self._exempt_children.add(pid)

    def exempt_thread(self, thread: threading.Thread) -> None:
        """`thread` may stay."""
        self._exempt_threads.add(thread)

    def exempt_threads(self, owned: Callable[[], Collection[threading.Thread]]) -> None:
        """Resources that `owned()` returns when the guard looks may stay: the threads of a pool that starts them on
        demand.
        """
        self._thread_owners.append(owned)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            frozenset(threading.enumerate()), frozenset(_children()), frozenset(_sockets()), frozenset(_segments())
        )

    def leaks(self, before: Snapshot, grace_s: float = GRACE_S) -> list[str]:
        """The new resources since `before` that have not gone after `grace_s`, one line each."""
        gc.collect(1)  # a dropped task or socket says so when it is freed; the test's own objects are young
        limit = time.monotonic() + grace_s
        while found := [line for check in self._checks() for line in check(before)]:
            if time.monotonic() >= limit:
                break
            gc.collect()
            time.sleep(POLL_S)
        return found

    def _checks(self) -> tuple[Callable[[Snapshot], Iterator[str]], ...]:
        return (self._new_threads, self._new_children, self._new_listeners, self._new_segments)

    def _new_threads(self, before: Snapshot) -> Iterator[str]:
        exempt = self._exempt_threads.union(*(owned() for owned in self._thread_owners))
        for thread in threading.enumerate():
            if thread in before.threads or thread in exempt:
                continue
            if not thread.daemon or thread.name.startswith("rpcdist"):
                yield f"thread {thread.name!r} is still running"

    def _new_children(self, before: Snapshot) -> Iterator[str]:
        for pid in _children() - before.children - self._exempt_children - {_resource_tracker_pid()}:
            with suppress(FileNotFoundError, ProcessLookupError):
                name, state = _name_and_state(pid)
                what = "ended, but nobody waited for it" if state == "Z" else "is still running"
                yield f"child process {pid} ({name}) {what}"

    def _new_listeners(self, before: Snapshot) -> Iterator[str]:
        for link, descriptor in _sockets().items():
            if link not in before.sockets and (address := _listening_address(descriptor)) is not None:
                yield f"the socket listening on {address} is still open"

    def _new_segments(self, before: Snapshot) -> Iterator[str]:
        for name in _segments() - before.segments:
            if _made_here(SHARED_MEMORY / name):
                yield f"the shared memory segment {SHARED_MEMORY / name} still exists"


@contextmanager
def loop_errors() -> Iterator[list[str]]:
    """Collects what event loops log at level ERROR: lost exceptions, failed callbacks, destroyed pending tasks."""
    collected: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(self.format(record))

    collector = Collector(level=logging.ERROR)
    logger = logging.getLogger("asyncio")
    logger.addHandler(collector)
    try:
        yield collected
    finally:
        logger.removeHandler(collector)


def _children() -> set[int]:
    """The children of all threads of this process."""
    found: set[int] = set()
    with suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def _sockets() -> dict[str, int]:
    """The open sockets of this process: the kernel's name for each, and a descriptor of it."""
    found: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                link = os.readlink(f"/proc/self/fd/{descriptor}")
                if link.startswith("socket:"):
                    found[link] = int(descriptor)
    return found


def _segments() -> set[str]:
    with suppress(FileNotFoundError):
        return set(os.listdir(SHARED_MEMORY))
    return set()


def _resource_tracker_pid() -> int | None:
    """multiprocessing starts this helper at the first need and keeps it until the interpreter exits."""
    return getattr(resource_tracker._resource_tracker, "_pid", None)


def _name_and_state(pid: int) -> tuple[str, str]:
    stat = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = stat[stat.index("(") + 1 :].rpartition(")")
    return name, rest.split()[0]


def _listening_address(descriptor: int) -> str | None:
    """The address that the socket listens on; None if it does not listen, or was closed meanwhile."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return str(copy.getsockname())
    return None


def _made_here(segment: Path) -> bool:
    """Whether `segment` is a matter of this process or one below it: other programs use /dev/shm, too.

    One that nobody holds may be left of a process below this one that died, so it counts. Semaphores do not: a process
    that makes one removes its name at once, so one without a holder belongs to another process that is just making it.
    """
    try:
        if segment.stat().st_uid != os.geteuid():
            return False
    except FileNotFoundError:
        return False
    if segment.name.startswith("cuda.shm."):  # the driver's, until its process ends
        return False
    holders = _holders(segment)
    return bool(holders & _descendants()) if holders else not segment.name.startswith("sem.")


def _holders(segment: Path) -> set[int]:
    """The processes, of those that this one may look at, that have `segment` mapped or open."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if str(segment) in Path(f"/proc/{entry}/maps").read_text() or _has_open(entry, str(segment)):
                    found.add(int(entry))
    return found


def _has_open(pid: str, path: str) -> bool:
    folder = f"/proc/{pid}/fd"
    for descriptor in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(f"{folder}/{descriptor}") == path:
                return True
    return False


def _descendants() -> set[int]:
    found: set[int] = set()
    unseen = [os.getpid()]
    while unseen:
        pid = unseen.pop()
        found.add(pid)
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                unseen.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found
