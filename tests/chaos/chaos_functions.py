"""The functions that the workers of the chaos tests call at each other. Each writes into the ledger that it ran, first
of all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from chaos_clock import ProcessorClock
from chaos_ledger import Ledger
from torch import Tensor

from rpcdist import rpc

__all__ = [
    "Held",
    "WrongAnswer",
    "accounted",
    "check",
    "close_books",
    "count_up",
    "echo",
    "echo_async",
    "fetch",
    "lost_s",
    "make",
    "open_books",
    "pass_on",
    "sleep",
    "sleep_async",
    "twice",
]

rpc_sync: Any = rpc.rpc_sync


class WrongAnswer(Exception):
    """The answer is not that of this call."""


class _Books:
    ledger: Ledger
    clock: ProcessorClock
    numbers: Iterator[int]
    lock = threading.Lock()


def open_books(path: str, process: int) -> None:
    """Before anything else in this worker. `process` is a number that no other worker of the run has."""
    _Books.ledger, _Books.clock = Ledger(path, process), ProcessorClock()
    _Books.numbers = iter(range(1, 2**32))
    _Books.clock.start()


def close_books() -> None:
    _Books.clock.stop()
    _Books.ledger.close()


def lost_s() -> float:
    """How long this process had no processor, since it opened its books."""
    return _Books.clock.lost_s()


class Account:
    """One call of this worker, from before it is made until its outcome.

    Attributes:
        call: its number, the first argument of each function here.
    """

    def __init__(self, kind: str, timeout_s: float) -> None:
        with _Books.lock:
            number = next(_Books.numbers)
        self.call = _Books.ledger.issued(number, kind)
        self._timeout_s = timeout_s
        self._late_s = 0.0
        self.wait_begins()

    def wait_begins(self) -> None:
        """The deadline counts from now: of a stream, each item has one."""
        self._began_s, self._lost_s = time.monotonic(), _Books.clock.lost_s()

    def wait_ends(self) -> None:
        took_s, lost_s = time.monotonic() - self._began_s, _Books.clock.lost_s() - self._lost_s
        self._late_s = max(self._late_s, took_s - lost_s - self._timeout_s)

    def closes(self, error: BaseException | None) -> None:
        self.wait_ends()
        if error is None:
            _Books.ledger.answered(self.call, self._late_s)
        else:
            _Books.ledger.failed(self.call, self._late_s, type(error).__name__)


@contextmanager
def accounted(kind: str, timeout_s: float) -> Iterator[Account]:
    """A call in this block has its outcome in the ledger, whatever that is; errors go on."""
    account = Account(kind, timeout_s)
    try:
        yield account
    except BaseException as exc:
        account.closes(exc)
        raise
    account.closes(None)


# ---------------------------------------------------------------- handlers


def echo(call: int, payload: Any) -> tuple[int, Any]:
    _Books.ledger.ran(call, "echo")
    return call, payload


async def echo_async(call: int, payload: Any) -> tuple[int, Any]:
    _Books.ledger.ran(call, "echo_async")
    await asyncio.sleep(0)
    return call, payload


def sleep(call: int, seconds: float) -> int:
    """Cannot be cancelled. The sleep is the work that it does."""
    _Books.ledger.ran(call, "sleep")
    time.sleep(seconds)
    return call


async def sleep_async(call: int, seconds: float) -> int:
    _Books.ledger.ran(call, "sleep_async")
    await asyncio.sleep(seconds)
    return call


def pass_on(call: int, to: str, timeout_s: float) -> int:
    """Calls a third worker; that call has a number of its own."""
    _Books.ledger.ran(call, "pass_on")
    with accounted("nested", timeout_s) as account:
        check(rpc_sync(to, echo, (account.call, None), timeout=timeout_s), (account.call, None))
    return call


def count_up(call: int, stop: int) -> Iterator[int]:
    _Books.ledger.ran(call, "count_up")
    yield from range(stop)


def twice(call: int, x: Tensor) -> Tensor:
    _Books.ledger.ran(call, "twice")
    return x * 2


class Held:
    """A value that references lead to."""

    def __init__(self) -> None:
        self.payload = torch.ones(1000)

    def add(self, call: int, number: int) -> int:
        _Books.ledger.ran(call, "add")
        return int(self.payload[0]) + number


def make(call: int) -> Held:
    _Books.ledger.ran(call, "make")
    return Held()


def fetch(call: int, reference: Any, timeout_s: float) -> int:
    """Fetches the value of somebody else's reference."""
    _Books.ledger.ran(call, "fetch")
    return int(reference.to_here(timeout_s).payload.numel())


def check(answer: object, expected: object, equal: Callable[[Any, Any], bool] = lambda a, b: a == b) -> None:
    if not equal(answer, expected):
        raise WrongAnswer(f"{answer!r} instead of {expected!r}")
