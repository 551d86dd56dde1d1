"""Tells neighbours that contexts are over. Contexts that hold little memory anywhere are named together, a while later:
a message of its own for each would cost a training loop more than all else that the end of a step needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rpcdist._proto import autograd_pb2
from rpcdist.rpc._autograd_hooks import AutogradHost
from rpcdist.time_limits import CONTEXT_RELEASE_DELAY_S

MAX_PUT_OFF = 256  # contexts


class Releases:
    """The contexts that are over here, and that neighbours have not been told about. Any thread may call any method.

    Args:
        host: the agent, whose control messages carry them.
    """

    def __init__(self, host: AutogradHost) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._put_off: dict[int, list[int]] = {}  # contexts by neighbour
        self._count = 0
        self._is_timed = False

    def tell(self, workers: Iterable[int], context_id: int, at_once: bool) -> None:
        """Tells workers that a context is over; `at_once`: now, and not within `CONTEXT_RELEASE_DELAY_S`."""
        if at_once:
            for worker in workers:
                self._send(worker, [context_id])
            return
        with self._lock:
            for worker in workers:
                self._put_off.setdefault(worker, []).append(context_id)
            self._count += 1
            is_full = self._count >= MAX_PUT_OFF
            starts_timer = not self._is_timed and not is_full and bool(self._put_off)
            self._is_timed = self._is_timed or starts_timer
        if is_full:
            self.flush()
        elif starts_timer:
            self._host.call_later(CONTEXT_RELEASE_DELAY_S, self._time_is_over)

    def flush(self) -> None:
        """Sends what was put off."""
        with self._lock:
            due, self._put_off, self._count = self._put_off, {}, 0
        for worker, contexts in due.items():
            self._send(worker, contexts)

    def _time_is_over(self) -> None:
        with self._lock:
            self._is_timed = False
        self.flush()

    def _send(self, worker: int, contexts: list[int]) -> None:
        if not self._host.is_closed:
            message = autograd_pb2.AutogradMessage(context=contexts[0])
            message.release.SetInParent()
            message.release.others.extend(contexts[1:])
            self._host.send_control(worker, message)
