"""What the I/O loop reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    loop.start()
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
