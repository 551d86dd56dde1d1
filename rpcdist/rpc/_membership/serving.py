"""A worker that serves until it is told to stop: by a signal, by another worker, or by the end of its agent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from rpcdist.deadline import Deadline
from rpcdist.errors import CoordinatorLost
from rpcdist.rpc._futures.interrupt import longest_sleep_s
from rpcdist.rpc._peers.network import check_speaks_for

STOP = "rpcdist.rpc._membership.serving:stop"
PING = "rpcdist.rpc._membership.serving:ping"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """One per agent; any thread may use it.

    A request to stop that comes before `wait` counts: the next `wait` returns at once.
    """

    def __init__(self) -> None:
        # Its `put` may interrupt its own `get`, so a signal handler may call it.
        self._requests: SimpleQueue[str | None] = SimpleQueue()
        self._lost: CoordinatorLost | None = None

    def stop(self, why: str) -> None:
        """Ends one `wait`."""
        self._requests.put(why)

    def orphaned(self, error: CoordinatorLost | None) -> None:
        """Ends every `wait` with this error, until it is called with None because a coordinator is there again."""
        self._lost = error
        self._requests.put(None)  # has `wait` look

    def wait(self, timeout_s: float | None) -> str | None:
        """Waits for a request to stop, and returns why it was made; None when the time is over.

        Raises:
            CoordinatorLost: see `orphaned`.

        On the main thread SIGTERM and SIGINT are such requests while it waits; a second one has its usual effect.
        """
        deadline = Deadline.after(timeout_s)
        with self._signals():
            while True:
                if self._lost is not None:
                    raise self._lost
                try:
                    why = self._requests.get(timeout=min(longest_sleep_s(), deadline.remaining_s()))
                    if why is not None:
                        return why
                except Empty:
                    if deadline.expired():
                        return None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def restore() -> None:
            for number, handler in before.items():
                if handler is not None:  # None: it was not set by Python, and cannot be set again
                    signal.signal(number, handler)

        def on_signal(number: int, frame: FrameType | None) -> None:
            restore()
            self.stop(signal.Signals(number).name)

        try:
            for number in SIGNALS:
                signal.signal(number, on_signal)
            yield
        finally:
            restore()

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        """The functions that every peer may call, by the name on the wire."""
        return {STOP: self._on_stop, PING: self._on_ping}

    async def _on_stop(self, name: str) -> None:
        check_speaks_for(name)
        self.stop(f"worker {name!r} asked for it")

    async def _on_ping(self) -> None:
        """The answer shows that this worker lives."""
