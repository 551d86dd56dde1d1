"""Functions for the workers of the tests of `rpcdist.LocalCluster`."""

from __future__ import annotations

import os
import signal

__all__ = ["be_killed", "environment_of", "pid"]


def pid() -> int:
    return os.getpid()


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def environment_of(name: str) -> str | None:
    return os.environ.get(name)
