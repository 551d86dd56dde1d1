"""Ranges in the profiles of `torch.profiler` (of calls, handlers, collective operations and buckets of DDP), and the
spans of `rpcdist.trace`.

While no profiler runs in this process, a place that has a range asks for one attribute and does nothing else. A
profiler records the thread that started it, and with `_ExperimentalConfig(profile_all_threads=True)` all threads, which
is where handlers and asynchronous operations run.

[Note: ranges and the end of a profiler] torch frees the memory of a range when the profiler ends, and writes the
range's end to it all the same when that comes later, even from the destructor of the range. So a range ends with its
block, on its thread, and one that its profiler did not outlive is never ended: its object is given up for good.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

from torch.autograd import profiler

_forget: Final = ctypes.pythonapi.Py_IncRef
_forget.argtypes, _forget.restype = (ctypes.py_object,), None


span_taps: Final[list[Callable[[str, str, float, float], object]]] = []
"""Called with the lane, the name, the begin and the end of what DDP, a pipeline or the reader of a stream has done in
this process, in seconds of the monotonic clock, on the thread that did it. Empty while there is no trace."""


operation_taps: Final[list[Callable[[str, str], Callable[[float, float, BaseException | None], object]]]] = []
"""Called with the group and the name of an operation where it is called. The function that each returns is called when
the operation has ended, with begin and end in seconds since the epoch, and its error. Empty while nobody wants it."""


def is_profiling() -> bool:
    """Whether a profiler runs in this process, on whatever thread."""
    return profiler._is_profiler_enabled


class _Ends:
    """Counts the ends of profilers: of each before torch frees its memory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the count changes, and while a range ends
        self.count = 0
        self._disable: Any = None

    def watch(self) -> None:
        """Has torch's profilers tell this from now on; they look the function up when they end."""
        with self.lock:
            if self._disable is None:
                self._disable = profiler._disable_profiler
                profiler._disable_profiler = self._disabled

    def _disabled(self) -> Any:
        with self.lock:
            self.count += 1
        return self._disable()


_ends: Final = _Ends()


class record_function:
    """A range while a `with` block lasts: torch's, but safe where the profiler ends before the block."""

    __slots__ = ("_began", "_range")

    def __init__(self, name: str) -> None:
        _ends.watch()
        self._range = profiler.record_function(name)

    def __enter__(self) -> None:
        self._began = _ends.count
        self._range.__enter__()

    def __exit__(self, *error: object) -> None:
        with _ends.lock:
            if self._began == _ends.count:
                self._range.__exit__(None, None, None)
            else:
                _forget(self._range)
