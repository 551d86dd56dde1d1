"""The functions that the workers of test_unread_answers.py run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from inside_agents import current_agent, mapped_bytes, reader_of, reserved_bytes

from rpcdist import rpc
from rpcdist.testing import LIMIT_S

ANSWER_BYTES = 1 << 20
_calls: list[rpc.Future[Any]] = []


def make_bytes() -> torch.Tensor:
    return torch.zeros(ANSWER_BYTES, dtype=torch.uint8)


def many_numbers() -> list[int]:
    return list(range(1 << 17))


async def stream_of(num_items: int) -> AsyncIterator[torch.Tensor]:
    for _ in range(num_items):
        yield make_bytes()


def fail_at_length() -> None:
    raise ValueError("x" * 2000)


def nothing() -> None:
    pass


# ---------------------------------------------------------------- at the attacker


def stop_reading(worker: str) -> None:
    """Reads no more of what the worker sends on the connection with its answers; heartbeats go on."""
    rpc.rpc_sync(worker, nothing, timeout=LIMIT_S)
    lead = _lead(worker)
    deadline = time.monotonic() + LIMIT_S
    while not lead._lock.acquire(False):  # the thread that reads holds this lock
        assert time.monotonic() < deadline
    assert lead._disarm() == 0


def read_on(worker: str) -> None:
    lead = _lead(worker)
    assert lead._arm() == 0
    lead._lock.release()


def _lead(worker: str) -> Any:
    agent = current_agent()
    session: Any = agent.router.session_with(agent.directory.resolve(worker))
    return reader_of(session)


def ask(worker: str, function: Any, num_calls: int, *arguments: Any) -> None:
    _calls.extend(rpc.rpc_async(worker, function, arguments, timeout=LIMIT_S) for _ in range(num_calls))


def outcomes() -> list[str]:
    """The name of the error of each call, or an empty string; and the last error."""
    errors = [call.exception(LIMIT_S) for call in _calls]
    _calls.clear()
    return [f"{type(error).__name__}: {error}" if error is not None else "" for error in errors]


def read_streams() -> list[str]:
    found = []
    for call in _calls:
        try:
            for _ in call.wait():
                pass
            found.append("")
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    _calls.clear()
    return found


# ---------------------------------------------------------------- at the victim


def account_of(worker: str) -> list[int]:
    """The bytes in the account of a worker, and those in lent memory; empty if it has no session here."""
    sessions: list[Any] = [session for session in current_agent().connections.taken if session.peer.name == worker]
    return [count(sessions[0].account) for count in (reserved_bytes, mapped_bytes)] if sessions else []


def num_served() -> tuple[int, int]:
    """How many calls have come, and how many of them are not over; without this one."""
    calls = current_agent().dispatcher.calls
    return calls.num_served - 1, len(calls) - 1
