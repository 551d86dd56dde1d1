"""Functions of the roles that the tests of `launch` start. Those that call others import `rpc`, and with it torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from rpcdist import launch, placement_from_environment
from rpcdist.errors import ConfigError, WorkerLost

__all__ = [
    "call_until_back",
    "die_once",
    "exit_after_lines",
    "launch_another",
    "name_and_threads",
    "return_nothing",
    "wait_for_ever",
]


def name_and_threads(rank: int, word: str) -> tuple[int, str, str | None, str]:
    place = placement_from_environment()
    assert place is not None and place.rank == rank
    print("says", word)
    return rank, place.name, place.role, os.environ["OMP_NUM_THREADS"]


def wait_for_ever(rank: int) -> None:
    print("waits")
    threading.Event().wait()


def exit_after_lines(rank: int) -> None:
    for number in range(30):
        print("line", number, file=sys.stderr)
    os._exit(3)


def launch_another(rank: int, arguments: dict[str, Any]) -> str:
    """Launches another job, as in another shell; returns its error, or nothing."""
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]:
        del os.environ[name]
    try:
        launch(return_nothing, workers=1, **arguments)
    except ConfigError as exc:
        return str(exc)
    return ""


def return_nothing(rank: int) -> None:
    """A rank that only returns."""


def die_once(rank: int, folder: str) -> str:
    from rpcdist import rpc

    rpc.init_rpc(_name())
    first = Path(folder, "was there")
    if not first.exists():
        first.touch()
        # Not before the others have joined and called.
        while not Path(folder, "called").exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.shutdown()
    return "came back"


def call_until_back(rank: int, victims: dict[str, str]) -> list[tuple[bool, bool]]:
    """Whether each victim, for which there is a folder, was lost, and was another process afterwards; in turn."""
    from rpcdist import rpc

    rpc.init_rpc(_name())
    found = []
    for victim, folder in victims.items():
        before = rpc.rpc_sync(victim, os.getpid, timeout=60)
        Path(folder, "called").touch()
        was_lost, pid = False, before
        while pid == before:
            try:
                pid = rpc.rpc_sync(victim, os.getpid, timeout=60)
            except WorkerLost:
                was_lost = True
                rpc.wait_for_worker(victim, timeout=60)
        found.append((was_lost, pid != before))
    rpc.shutdown()
    return found


def _name() -> str:
    place = placement_from_environment()
    assert place is not None
    return place.name
