"""The exceptions that say how a job has ended."""

from __future__ import annotations

import signal
import sys

from rpcdist._launch.progress import Failed, Late, Stuck
from rpcdist._launch.reports import Exited, Raised
from rpcdist.errors import DeadlineExceeded, ProcessFailed
from rpcdist.time_limits import LAUNCH_EXIT_LIMIT_S


class Interrupted(KeyboardInterrupt, SystemExit):
    """Ctrl-C. Where nothing catches it, the program ends with exit code 130 and without a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.code = 128 + signal.SIGINT


def interrupted() -> BaseException:
    """The error after Ctrl-C: `Interrupted`, or in a notebook or at a prompt, which go on, `KeyboardInterrupt`."""
    if hasattr(sys, "ps1"):
        return KeyboardInterrupt()
    print("\ninterrupted", file=sys.stderr)
    return Interrupted()


def error_of(outcome: Failed | Late | Stuck, workers: int, join_timeout_s: float | None = None) -> BaseException:
    """The exception for a job of so many workers that did not succeed."""
    if isinstance(outcome, Late):
        ranks = ", ".join(map(str, outcome.ranks))
        return DeadlineExceeded(f"after {join_timeout_s:g} s these of {workers} ranks had not ended: {ranks}")
    if isinstance(outcome, Stuck):
        what = f"returned, but its process did not end within {LAUNCH_EXIT_LIMIT_S:g} s: is a thread still running?"
        return ProcessFailed(outcome.rank, what)
    cause = outcome.cause
    if isinstance(cause, Exited):
        return SystemExit(cause.code)
    if isinstance(cause, Raised):
        return ProcessFailed(outcome.rank, f"raised {cause.type_name}", traceback=cause.traceback)
    return ProcessFailed(outcome.rank, str(cause), exit_code=cause.returncode)
