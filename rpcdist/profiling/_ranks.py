"""What the two processes of a profile do: rank 0 calls, rank 1 answers."""

from __future__ import annotations

import time
from typing import NamedTuple

from rpcdist import rpc
from rpcdist.profiling import _calls
from rpcdist.profiling._marks import Mark, Recorder
from rpcdist.profiling._points import POINTS
from rpcdist.profiling._stages import CallTimes


class Settings(NamedTuple):
    """How to measure.

    Attributes:
        kind: which call, one of `rpcdist.profiling._command.KINDS`.
        size_bytes: of the tensor of an echo.
        num_calls: calls that are measured; a tenth as many warm up.
        pause_s: how long to sleep before each call: what runs after a pause finds its data out of the caches.
        with_marks: whether to mark the stages.
    """

    kind: str
    size_bytes: int
    num_calls: int
    pause_s: float
    with_marks: bool


class Measured(NamedTuple):
    """What one process measured.

    Attributes:
        calls: the caller's; the callee has none.
        marks: of this process.
        missing: points that could not be marked.
    """

    calls: list[CallTimes]
    marks: list[Mark]
    missing: list[str]


def measure(rank: int, settings: Settings) -> Measured:
    """Runs in each process, see `launch`."""
    name = ("caller", _calls.CALLEE)[rank]
    recorder = Recorder(name)
    missing: list[str] = []
    if settings.with_marks:
        recorder.install_sockets()  # before `init_rpc`: sessions may keep bound methods
        missing = recorder.install(POINTS)
    rpc.init_rpc(name)
    calls = _call(settings) if rank == 0 else []
    rpc.shutdown()
    return Measured(calls, recorder.marks(), missing)


def _call(settings: Settings) -> list[CallTimes]:
    call = _calls.make_call(settings.kind, settings.size_bytes)
    for _ in range(settings.num_calls // 10 + 1):
        call()
    calls = []
    for _ in range(settings.num_calls):
        if settings.pause_s:
            time.sleep(settings.pause_s)
        began_ns = time.monotonic_ns()
        call()
        calls.append(CallTimes(began_ns, time.monotonic_ns()))
    return calls
