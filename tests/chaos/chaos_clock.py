"""How long this process had no processor: stopped, its interpreter lock held, or the machine busy with others."""

from __future__ import annotations

import threading
import time

__all__ = ["ProcessorClock"]

PERIOD_S = 0.02


class ProcessorClock(threading.Thread):
    """Ticks. A tick that comes late, while this process did no work, is time that was taken from it.

    A wait that was held up by it is not the wait's fault, whereas a process that is late because it works is.
    """

    def __init__(self) -> None:
        super().__init__(name="processor clock", daemon=True)
        self._ends = threading.Event()
        self._lost_s = 0.0
        self._tick = (time.monotonic(), time.process_time())
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._ends.wait(PERIOD_S):
            with self._lock:
                self._lost_s += self._late_s()
                self._tick = (time.monotonic(), time.process_time())

    def lost_s(self) -> float:
        """Since the start, in seconds. Differences count."""
        with self._lock:  # the first look after a stop sees it, without waiting for a tick
            return self._lost_s + self._late_s()

    def _late_s(self) -> float:
        ticked, worked = self._tick
        return max(0.0, time.monotonic() - ticked - PERIOD_S - (time.process_time() - worked))

    def stop(self) -> None:
        self._ends.set()
        self.join()
