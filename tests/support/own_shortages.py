"""Takes from a process what it needs: file descriptors. For this process, and for a worker of a test."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

from inside_agents import current_agent, peers_of
from rpc_victim_functions import add, make

from rpcdist import rpc
from rpcdist.own_shortage import raise_descriptor_limit
from rpcdist.testing import LIMIT_S, eventually

__all__ = [
    "NUM_RESERVED",
    "calls_in_a_shortage",
    "cut_connection",
    "few_descriptors",
    "free_descriptors",
    "hold_reference",
    "no_free_descriptor",
    "reserve_descriptors",
    "take_descriptors",
    "use_reference",
]

NUM_RESERVED = 64
"""The lowest numbers of a worker's descriptors, and its limit in a shortage. No connection has one of them, so none
becomes free when a connection ends."""

_held: list[Any] = []
_limits: list[tuple[int, int]] = []


def no_free_descriptor() -> AbstractContextManager[None]:
    """Leaves this process no free descriptor."""
    return few_descriptors(0)


@contextmanager
def few_descriptors(num_free: int) -> Iterator[None]:
    """Leaves this process so many free descriptors."""
    raise_descriptor_limit()  # what starts here raises it once
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in range(soft) if not _is_open(number))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, num_free, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- in a worker


def reserve_descriptors() -> None:
    """Before the worker has connections."""
    while (number := os.open(os.devnull, os.O_RDONLY)) < NUM_RESERVED:
        pass
    os.close(number)


def take_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _limits.append((soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_RESERVED, hard))


def free_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, _limits.pop())


def hold_reference(owner: str) -> None:
    held = rpc.remote(owner, make)
    assert held.to_here() == 7
    _held.append(held)


def use_reference() -> object:
    return _held[0].to_here(timeout=LIMIT_S)


def cut_connection(to: str) -> None:
    """Ends this worker's own connection to another one, and waits until it is noticed."""
    agent = current_agent()
    id = rpc.get_worker_info(to).id
    session = peers_of(agent)[id].session
    assert session is not None
    session.close("cut by the test")
    eventually(lambda: agent.router.session_with(id) is not session, "the connection has ended")


def calls_in_a_shortage(to: str, lasting_s: float, timeout_s: float) -> list[tuple[str, str]]:
    """Calls a worker again and again; the types and texts of the errors. The last is that of a call without a limit."""
    errors: list[tuple[str, str]] = []
    unlimited = rpc.rpc_async(to, add, (1, 2), timeout=0)
    ends = time.monotonic() + lasting_s
    while time.monotonic() < ends:
        errors.append(_error_of(rpc.rpc_async(to, add, (1, 2), timeout=timeout_s)))
    return [*errors, _error_of(unlimited)]


def _error_of(future: rpc.Future[Any]) -> tuple[str, str]:
    try:
        return "", f"returned {future.wait(LIMIT_S)!r}"
    except Exception as exc:
        return type(exc).__name__, str(exc)
