"""`LocalProcess`: what the groups of one process share, whatever their ranks and backends are."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.collectives._group.flight_records import FlightRecorder
from rpcdist.time_limits import GROUP_EXIT_LIMIT_S

if TYPE_CHECKING:
    from rpcdist.collectives._group.shared_sockets import SharedSockets
    from rpcdist.transport.records import Records


class Closable(Protocol):
    """A backend, as far as the end of the process is concerned."""

    def close(self, timeout_s: float) -> None: ...


class LocalProcess:
    """The sockets through which other ranks reach this process, its flight recorder, and its open backends.

    Attributes:
        recorder: the flight recorder.
    """

    def __init__(self) -> None:
        self.recorder = FlightRecorder()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._sockets: SharedSockets | None = None
        self._open_backends: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._at_exit = partial(_close_all, weakref.ref(self))

    def acquire_sockets(self, host: str) -> SharedSockets:
        """A share of this process's sockets, opened on `host` if none are open yet; `release` each share once.

        Raises:
            TransportError: the address cannot be bound.
        """
        from rpcdist.collectives._group.shared_sockets import SharedSockets  # loads gRPC

        with self._lock:
            if self._sockets is None or not self._sockets.acquire():
                self._sockets = SharedSockets(host)
            return self._sockets

    def records(self) -> Records:
        """Signs what this process tells others through a store, with the job's token.

        Raises:
            ConfigError: there is no usable token.
        """
        from rpcdist.transport import acquire_node  # loads gRPC

        node = acquire_node()
        try:
            return node.records
        finally:
            node.release()

    def close_at_exit(self, backend: Closable) -> None:
        """Closes a backend that is still open when the process ends: its peers see a rank that left, not one that died.

        Call it once the backend uses the transport: what is registered later runs earlier, and closing needs it.
        """
        with self._lock:
            unregister_at_exit(self._at_exit)
            register_at_exit(self._at_exit)
            self._open_backends.add(backend)

    def close_backends(self) -> None:
        """Closes all backends that are still open; bounded."""
        if os.getpid() == self._pid:  # after a fork they belong to the parent
            for backend in list(self._open_backends):
                backend.close(GROUP_EXIT_LIMIT_S)


def _close_all(process: weakref.ref[LocalProcess]) -> None:
    living = process()
    if living is not None:
        living.close_backends()
