"""How long handlers wait for the interpreter lock."""

from __future__ import annotations

import time


class GilWait:
    """A running mean. `sample` gives the lock away and takes it back, which is the wait that is measured."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._num = 0

    def sample(self) -> None:
        started = time.perf_counter()
        time.sleep(0)
        self._total_s += time.perf_counter() - started
        self._num += 1

    def average_us(self) -> float:
        return self._total_s / self._num * 1e6 if self._num else 0.0
