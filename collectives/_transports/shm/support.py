"""Whether this machine can run collective operations over shared memory."""

from __future__ import annotations

import platform
import sys

from rpcdist.collectives._transports.shm import futex
from rpcdist.transport import shared_memory


def unsupported_here() -> str | None:
    """Why ranks on this machine cannot use shared memory, as a clause for a message, or None when they can.

    Flags are plain stores, made after those of the data that they announce. Only x86-64 is known to show them to
    other cores in that order; see [Note: store order] in `signals`.
    """
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        return f"its flags rely on the store order of x86-64, and this is {machine or 'an unknown processor'}"
    if sys.platform != "linux":
        return f"{sys.platform} has no futex"
    return shared_memory.unavailable() or futex.unavailable()
