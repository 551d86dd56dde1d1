"""Ranges in the profiles of `torch.profiler`: of calls, handlers, collective operations and buckets of DDP.

While no profiler runs in this process, a place that has a range asks for one attribute and does nothing else. A
profiler records the thread that started it, and with `_ExperimentalConfig(profile_all_threads=True)` all threads, which
is where handlers and asynchronous operations run.
"""

from __future__ import annotations

from torch.autograd import profiler
from torch.autograd.profiler import record_function

__all__ = ["is_profiling", "record_function"]


def is_profiling() -> bool:
    """Whether a profiler runs in this process, on whatever thread."""
    return profiler._is_profiler_enabled
