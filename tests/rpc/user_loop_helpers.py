"""User loops for tests, and what their calls end with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from rpcdist.deadline import NEVER, Deadline
from rpcdist.rpc._executors.user_loop import UserLoop

__all__ = ["LIMIT_S", "Outcome", "forever", "loop", "run"]

LIMIT_S = 30.0


@pytest.fixture
def loop() -> Iterator[UserLoop]:
    user_loop = UserLoop()
    user_loop.register_at_exit()
    yield user_loop
    assert user_loop.close(LIMIT_S) == []


class Outcome:
    """An `on_done` that keeps what it got."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, BaseException | None]] = []
        self.thread: str | None = None
        self._done = threading.Event()

    def __call__(self, result: object, error: BaseException | None) -> None:
        self.calls.append((result, error))
        self.thread = threading.current_thread().name
        self._done.set()

    def get(self) -> object:
        assert self._done.wait(LIMIT_S)
        ((result, error),) = self.calls
        if error is not None:
            raise error
        return result


def run(loop: UserLoop, start: Callable[[], Awaitable[Any]], deadline: Deadline = NEVER) -> Any:
    outcome = Outcome()
    loop.submit(start, outcome, deadline)
    return outcome.get()


async def forever() -> None:
    await asyncio.Event().wait()
