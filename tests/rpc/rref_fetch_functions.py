"""The functions of the workers of `test_rref_fetches`: their main threads create values elsewhere, and wait for
them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Final

from inside_agents import current_agent
from threads_at_once import problems_of_threads

from rpcdist import rpc
from rpcdist.errors import DeadlineExceeded, OwnerLost
from rpcdist.testing.limits import wait_until_stopped

_gate: Final = threading.Event()
_made: Final[list[Any]] = []


def nothing() -> None:
    """Connects two workers."""


def num_handled_calls() -> int:
    """The calls of others that this worker is handling."""
    return len(current_agent().dispatcher.calls)


def behind_the_gate(number: int) -> int:
    """A function of `remote()` that ends when the test says so."""
    if not _gate.wait(60):
        raise TimeoutError("nobody opened the gate")
    return number


def open_gate() -> None:
    _gate.set()


def create_and_kill(owner: str, pid: int) -> str:
    """The owner dies while the creation lingers, and before it is asked for the value."""
    rpc.rpc_sync(owner, nothing)
    rref = rpc.remote(owner, int, args=(3,))
    os.kill(pid, signal.SIGKILL)
    try:
        return f"a value: {rref.to_here()}"
    except OwnerLost as exc:
        return f"OwnerLost: {exc.worker}"


def create_and_wait(owner: str) -> str:
    """The owner dies while this thread waits, and reads."""
    try:
        return f"a value: {rpc.remote(owner, behind_the_gate, args=(3,)).to_here()}"
    except OwnerLost as exc:
        return f"OwnerLost: {exc.worker}"


def create_and_stop(owner: str, pid: int) -> tuple[str, int]:
    """The owner is stopped before the creation leaves; returns the error of a short wait, and the result of a patient
    one.
    """
    rpc.rpc_sync(owner, nothing)
    rref = rpc.remote(owner, int, args=(3,))
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)
    try:
        rref.to_here(timeout=0.3)
        early = "a value"
    except DeadlineExceeded as exc:
        early = str(exc)
    finally:
        os.kill(pid, signal.SIGCONT)
    return early, rref.to_here()


def fetch_until_interrupted(owner: str) -> str:
    rref = rpc.remote(owner, behind_the_gate, args=(3,))
    _made.append(rref)
    try:
        return f"a value: {rref.to_here()}"
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def fetch_again() -> int:
    value: int = _made.pop().to_here()
    return value


def fetch_from_threads(owner: str, num_threads: int, num_calls: int) -> list[str]:
    """Creates and fetches from several threads at once, with creations that nobody fetches in between."""

    def work(thread: int) -> Iterator[str]:
        for number in range(1000 * thread, 1000 * thread + num_calls):
            rref, unused = rpc.remote(owner, int, args=(number,)), rpc.remote(owner, int, args=(-1,))
            if rref.to_here() != number:
                yield f"{number}: wrong"
            del rref, unused

    return problems_of_threads(work, num_threads)
