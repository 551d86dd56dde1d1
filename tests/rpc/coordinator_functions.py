"""The functions of workers while their coordinator is killed and replaced; they import this module by its name."""

from __future__ import annotations

import time

from inside_agents import current_agent
from rpc_functions import add

from rpcdist import rpc
from rpcdist.errors import RpcdistError, WorkerLost
from rpcdist.testing import LIMIT_S


def answers(to: str) -> bool:
    try:
        return bool(rpc.rpc_sync(to, add, (1, 2)) == 3)
    except WorkerLost:
        return False


def incarnation_of(worker: int) -> int:
    found: int = current_agent().directory.incarnation_of(worker)
    return found


def address_of(worker: int) -> str:
    found: str = current_agent().directory.member(worker).address
    return found


def call_until_another_coordinator_answers(survivor: str, coordinator: str, before: int) -> int:
    """Calls a survivor without a pause until another process answers as the coordinator; the number of these calls."""
    count, end = 0, time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert rpc.rpc_sync(survivor, add, (1, 2)) == 3
        count += 1
        if answers(coordinator) and incarnation_of(0) != before:
            return count
    raise RpcdistError(f"no other coordinator answered within {LIMIT_S} s")


def gather(name: str) -> dict[str, str]:
    found: dict[str, str] = rpc.api._all_gather(name)
    return found


def leave() -> dict[str, str]:
    return dict(rpc.shutdown())
