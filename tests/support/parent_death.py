"""The end of a forked process with the one that forked it, which the kernel sees to: Linux only."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG: Final = 1  # of <sys/prctl.h>


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
