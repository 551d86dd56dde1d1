"""The reports of the I/O loop."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Iterator

import pytest

from rpcdist.errors import DeadlineExceeded
from rpcdist.transport.io_loop import IoLoop

LIMIT_S = 10.0


class PollerCompletionQueue:
    """Named like gRPC's poller, which all loops of a process share."""

    def handle_events(self, loop: object) -> None:
        raise RuntimeError("Event loop is closed")


def fail() -> None:
    raise RuntimeError("Event loop is closed")


@pytest.fixture
def io() -> Iterator[IoLoop]:
    loop = IoLoop("rpcdist-test")
    loop.start_thread()
    yield loop
    loop.close()


async def nothing() -> None:
    """Runs after everything that was scheduled before it."""


def test_an_event_of_grpc_for_a_closed_loop_is_not_an_error(io: IoLoop, reported_loop_errors: list[str]) -> None:
    io.call_soon(PollerCompletionQueue().handle_events, None)
    io.run(nothing(), LIMIT_S)
    assert reported_loop_errors == []


def test_other_failures_are_reported(io: IoLoop, reported_loop_errors: list[str]) -> None:
    io.call_soon(fail)
    io.run(nothing(), LIMIT_S)
    assert len(reported_loop_errors) == 1
    assert "RuntimeError: Event loop is closed" in reported_loop_errors[0]
    reported_loop_errors.clear()


def test_a_worker_that_could_not_start_is_not_joined(io: IoLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the loop raised "cannot join thread before it is started"."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            io.start_worker(fail, "a worker")
    io.close()


def test_an_operation_gets_its_time_after_the_process_stood_still(io: IoLoop) -> None:
    """As after SIGSTOP. The waiting thread often woke before the loop, and a worker that was ending left threads."""
    for _ in range(5):
        holding = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(400_000,))  # holds the interpreter lock
        io.call_soon(holding.start)
        io.run(asyncio.sleep(0.05), 0.2)
        holding.join(LIMIT_S)


def test_an_operation_that_takes_too_long_ends(io: IoLoop) -> None:
    with pytest.raises(DeadlineExceeded, match=r"an operation took longer than 0\.05 s"):
        io.run(asyncio.sleep(LIMIT_S), 0.05)
