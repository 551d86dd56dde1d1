"""Where the time of a process goes, thread by thread: CPU seconds from the kernel, functions from cProfile.

cProfile sees one thread only. The hook of `threading.setprofile` gives each new Python thread a profiler of its own.
That makes small functions look slower than they are, so compare profiles with profiles, never with timings.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

__all__ = ["ThreadProfiler"]

NUM_FUNCTIONS = 18
TASKS = Path("/proc/self/task")


class ThreadProfiler:
    """Profiles the thread that installs it and every Python thread that starts later."""

    def __init__(self) -> None:
        self._profiles: dict[int, tuple[str, cProfile.Profile]] = {}  # by the kernel's thread id
        self._cpu_before: dict[int, float] = {}
        self._wall_before = time.monotonic()

    def install(self) -> None:
        """Must run before the threads of interest start. For CPython 3.11: 3.12 allows one profiler at a time."""
        threading.setprofile(self._on_first_event)
        self._enable()

    def reset(self) -> None:
        """Forgets what was counted so far."""
        for _, profile in self._profiles.values():
            profile.clear()
        self._cpu_before = cpu_seconds()
        self._wall_before = time.monotonic()

    def report(self) -> str:
        """The functions of every thread since `reset`, the busiest first."""
        wall_s = time.monotonic() - self._wall_before
        used = {thread: now_s - self._cpu_before.get(thread, 0.0) for thread, now_s in cpu_seconds().items()}
        lines = [f"CPU of {wall_s:.2f} s by thread:"]
        busiest = sorted(used, key=used.__getitem__, reverse=True)
        lines += [f"  {used[thread]:8.3f} s  {self._name(thread)}" for thread in busiest if used[thread] > 0.005]
        lines += [self._functions(thread) for thread in busiest if thread in self._profiles and used[thread] > 0.02]
        return "\n".join(lines)

    def _on_first_event(self, frame: FrameType, event: str, argument: object) -> None:
        self._enable()  # replaces this hook on this thread

    def _enable(self) -> None:
        profile = cProfile.Profile()
        thread = threading.current_thread()
        self._profiles[threading.get_native_id()] = (thread.name, profile)
        profile.enable()

    def _name(self, thread: int) -> str:
        names = {each.native_id: each.name for each in threading.enumerate()}
        if thread in names:
            return names[thread]
        try:
            return f"[{(TASKS / str(thread) / 'comm').read_text().strip()}] (not a Python thread)"
        except OSError:
            return f"{thread} (ended)"

    def _functions(self, thread: int) -> str:
        name, profile = self._profiles[thread]
        text = io.StringIO()
        try:
            stats = pstats.Stats(cast(cProfile.Profile, _Snapshot(profile)), stream=text)
        except TypeError:  # nothing was called
            return f"\n{name}: no calls"
        stats.strip_dirs().sort_stats("tottime").print_stats(NUM_FUNCTIONS)
        rows = [line for line in text.getvalue().splitlines() if line.strip() and not line.startswith("   Ordered")]
        return "\n".join([f"\nthread {name}", *rows])


class _Snapshot:
    """The part of a profile that `pstats` reads; unlike `Profile.create_stats` it leaves other threads' profilers
    running.
    """

    def __init__(self, profile: cProfile.Profile) -> None:
        profile.snapshot_stats()
        self.stats: dict[Any, Any] = profile.stats

    def create_stats(self) -> None:
        """`stats` is already there."""


def cpu_seconds() -> dict[int, float]:
    """CPU seconds of every thread of this process, also of those that are not Python's (Linux)."""
    seconds = {}
    for task in TASKS.iterdir():
        try:
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it ended meanwhile
            continue
    return seconds
