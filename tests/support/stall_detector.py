"""Whether a living worker answers while something is done to it: its I/O loop, and its pool of threads.

Runs inside of the worker, all the time between `start_stall_detector` and `longest_stalls`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from inside_agents import current_agent

__all__ = ["STALL_LIMIT_S", "longest_stalls", "start_stall_detector"]

STALL_LIMIT_S = 1.0
PAUSE_S = 0.05
BLOCKED_S = 20.0  # without any work of this process: no busy machine takes so long


class _Detector(threading.Thread):
    """Asks both, again and again.

    A machine that has no processor for the worker is not the worker's fault. So what counts of a wait is the time in
    which this process did work, on whatever thread; unless the answer takes so long that something must be blocked.
    """

    def __init__(self) -> None:
        super().__init__(name="stall detector", daemon=True)
        agent = current_agent()
        self._ask: dict[str, Callable[[Callable[[], object]], object]] = {
            "I/O loop": agent.caller.io.call_soon,
            "pool": agent.pool.submit,
        }
        self.longest_s = dict.fromkeys(self._ask, 0.0)
        self.num_asked = 0
        self.ends = threading.Event()

    def run(self) -> None:
        is_over = False
        while not is_over:  # at least once, however short the test is
            for name, ask in self._ask.items():
                answered = threading.Event()
                began, worked = time.monotonic(), time.process_time()
                ask(answered.set)
                answered.wait(BLOCKED_S)
                took_s, work_s = time.monotonic() - began, time.process_time() - worked
                stall_s = took_s if took_s >= BLOCKED_S else min(took_s, work_s)
                self.longest_s[name] = max(self.longest_s[name], stall_s)
            self.num_asked += 1
            is_over = self.ends.wait(PAUSE_S)


class _Place:
    detector: _Detector | None = None


def start_stall_detector() -> None:
    """Starts it in this worker."""
    assert _Place.detector is None
    _Place.detector = _Detector()
    _Place.detector.start()


def longest_stalls() -> tuple[int, dict[str, float]]:
    """Ends it. How often it asked, and the longest stall of each part, in seconds."""
    detector, _Place.detector = _Place.detector, None
    assert detector is not None
    detector.ends.set()
    detector.join(3 * BLOCKED_S)
    return detector.num_asked, detector.longest_s
