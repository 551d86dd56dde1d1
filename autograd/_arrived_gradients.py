"""The gradients of sends that have arrived in a backward pass, and the gates that wait for more."""

from __future__ import annotations

import threading
from _thread import RLock
from collections.abc import Mapping

from rpcdist.autograd._message_nodes import Gradients
from rpcdist.deadline import Deadline
from rpcdist.rpc._executors.blocking import blocking


class ArrivedGradients:
    """Gradients by message. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._changed: threading.Condition | None = None  # made for the first gate; most passes have none
        self._gradients: dict[int, Gradients] = {}
        self._is_closed = False

    def __getitem__(self, message: int) -> Gradients:
        return self._gradients[message]

    def __repr__(self) -> str:
        return f"<ArrivedGradients [{len(self._gradients)} messages]>"

    def add(self, gradients: Mapping[int, Gradients]) -> None:
        with self._lock:
            self._gradients.update(gradients)
            if self._changed is not None:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits: the pass is over."""
        with self._lock:
            self._is_closed = True
            if self._changed is not None:
                self._changed.notify_all()

    def wait(self, message: int, deadline: Deadline) -> Gradients | None:
        """The gradients of a message; blocks until they are there. None when the time or the pass is over."""
        with self._lock, blocking():
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            self._changed.wait_for(lambda: message in self._gradients or self._is_closed, deadline.wait_s())
            return self._gradients.get(message)
