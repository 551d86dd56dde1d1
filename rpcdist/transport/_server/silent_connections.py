"""Ends gRPC connections that have made no call, if there are too many of them.

gRPC accepts every connection, keeps 50 KiB for each unfinished TLS handshake, and waits 5 seconds for it. It has no
hook to check a connection first. So this module reads the descriptors of the process: a connection to gRPC's port that
made no call is a stranger, or a newcomer in TLS. The oldest strangers are shut down, which makes gRPC close them, until
their number is within the limit on unproven connections (`admission.py`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rpcdist.time_limits import HANDSHAKE_LIMIT_S
from rpcdist.transport._server.admission import MAX_UNPROVEN, Origin

logger = logging.getLogger(__name__)

_EXAMINE_EVERY: Final = 64
"""New connections between two examinations: reading a thousand descriptors takes some milliseconds."""

MAX_CONNECTIONS_KNOWN: Final = 16_384
_MAPPED: Final = "::ffff:"  # prefix of an IPv4 address at an IPv6 socket


class SilentConnections:
    """Counts gRPC connections that began TLS, and those that made a call; gRPC does not report the others.

    The TLS certificates are made from the token, so a process with another token fails in TLS. One warning reports
    that, unless each of these processes was also refused by name. While many connections arrive, `begun` examines all
    of them, on gRPC's accepting thread, which accepts no others meanwhile; the other methods run on the I/O loop.

    Args:
        num_named: returns the number of processes refused by name because of their token.
    """

    def __init__(self, num_named: Callable[[], int]) -> None:
        self.ports: set[int] = set()
        self._num_named = num_named
        self._check: asyncio.TimerHandle | None = None
        self._is_warned = False
        self._num_begun = 0
        self._num_calling = 0
        self._known: dict[Origin, None] = {}  # the connections that have made a call, the oldest first
        self._first_seen: dict[Origin, int] = {}  # the examination that saw each connection first
        self._num_examinations = self._num_new = 0
        self._lock = threading.Lock()
        self._making_known = threading.Lock()  # a connection is ended before its call is handled, or not at all

    @property
    def num_silent(self) -> int:
        """Connections that made no call. A few are harmless: their client has disconnected, or is about to call."""
        return max(0, self._num_begun - self._num_calling)

    def count(self) -> None:
        """Called when TLS begins on a connection; on the I/O loop."""
        self._num_begun += 1
        self._check_later()

    def _check_later(self) -> None:
        if not self._is_warned and self._check is None and self.num_silent > self._num_named():
            self._check = asyncio.get_running_loop().call_later(HANDSHAKE_LIMIT_S, self._warn, self._num_begun)

    def _warn(self, num_begun: int) -> None:
        """Warns if some of the first `num_begun` connections made no call; later ones may be about to."""
        self._check = None
        if num_begun - self._num_calling <= self._num_named():
            self._check_later()
        else:
            self._is_warned = True
            logger.warning(
                "a connection to this process failed in TLS. If it came from a process of the job, that process has "
                "another job token and reports the same error: give all processes the same RPCDIST_TOKEN. Or its clock "
                "differs from this one by more than a day. Port scans and TCP probes also fail like this. This is "
                "logged once"
            )

    def close(self) -> None:
        """Cancels the check, since no peer can connect any more."""
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def calls(self, connection: Origin | None) -> None:
        """Records that a connection makes a call, so its TLS succeeded; None for an unknown connection."""
        if connection is None:
            self._num_calling += 1
        elif connection not in self._known:
            self._num_calling += 1
            with self._making_known:
                self._known[connection] = None
            if len(self._known) > MAX_CONNECTIONS_KNOWN:
                self._known.pop(next(iter(self._known)), None)

    def begun(self) -> None:
        """Counts an accepted connection, and examines all connections if there are many."""
        if not self._lock.acquire(blocking=False):  # another thread examines them
            return
        try:
            self._num_new += 1
            if self._num_new >= _EXAMINE_EVERY and self._num_new + len(self._first_seen) > MAX_UNPROVEN // 2:
                self._examine()
        except Exception:
            logger.exception("the connections to this process cannot be examined")
        finally:
            self._lock.release()

    def _examine(self) -> None:
        self._num_examinations += 1
        self._num_new = 0
        try:
            found = self._found()
        except OSError:  # no descriptor is free to examine others; gRPC's own limit ends them
            return
        seen = {end: self._first_seen.get(end, self._num_examinations) for end in found}
        left: Counter[str] = Counter()
        for end in sorted(seen, key=seen.__getitem__, reverse=True):  # the newest first
            if left[end.host] < MAX_UNPROVEN // 2 and left.total() < MAX_UNPROVEN:
                left[end.host] += 1
            elif self._shut_down(found[end], end):
                del seen[end]
        if len(found) > len(seen):
            logger.info("ended %d connections that had made no call yet", len(found) - len(seen))
        self._first_seen = seen

    def _found(self) -> dict[Origin, int]:
        """The descriptors of connections that have made no call, by their remote end."""
        found: dict[Origin, int] = {}
        alive: set[Origin] = set()
        known = list(self._known)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with _copy(descriptor) as connection:
                end = None if connection is None else self._end(connection)
            if end is not None:
                alive.add(end)
                if end not in self._known:
                    found[end] = descriptor
        for origin in set(known) - alive:
            self._known.pop(origin, None)
        return found

    def _end(self, connection: socket.socket) -> Origin | None:
        """The remote end of a connection to gRPC's port; None for other sockets."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return None
        try:
            if connection.getsockname()[1] not in self.ports:
                return None
            host, port = connection.getpeername()[:2]
        except OSError:  # a listener, or it has just ended
            return None
        return Origin(host.removeprefix(_MAPPED), str(port))

    def _shut_down(self, descriptor: int, end: Origin) -> bool:
        """Shuts a connection down, unless its descriptor has been reused, or it has made a call, since it was found."""
        with suppress(OSError), _copy(descriptor) as connection, self._making_known:
            if connection is not None and end not in self._known and self._end(connection) == end:
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False


@contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket | None]:
    """Duplicates a socket's descriptor, so that it stays the same connection if the number is reused; None for others.

    Raises:
        OSError: no descriptor is free for the duplicate.
    """
    try:
        is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        copy = os.dup(descriptor) if is_socket else -1
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        copy = -1  # closed meanwhile
    if copy < 0:
        yield None
        return
    with socket.socket(fileno=copy) as connection:
        yield connection
