"""Heartbeats of a process that stood still: it reads before it speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rpcdist.transport.heartbeats import TURNS_TO_READ, Heartbeats

LIMIT_S = 40.0
LONG_AGO = float("-inf")


class RecordingSession:
    """What heartbeats do with a session, in `events`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.last_received = LONG_AGO
        self.last_sent = LONG_AGO

    def has_unread(self) -> bool:
        return False

    def send(self, message: object) -> Any:
        self.events.append("heartbeat")

    def close(self, reason: str) -> None:
        self.events.append("closed")

    def trim(self, now: float) -> None:
        pass


@pytest.mark.parametrize("is_closed_by_peer", [False, True])
async def test_a_loop_that_was_held_up_reads_before_it_speaks(is_closed_by_peer: bool) -> None:
    """With the heartbeat first, a connection that the peer has closed meanwhile would look as good as any."""
    session = RecordingSession()
    heartbeats = Heartbeats(session, LIMIT_S)
    loop = asyncio.get_running_loop()
    heartbeats.start(loop)
    heartbeats.stop()
    heartbeats._due -= LIMIT_S  # it should have been then
    heartbeats._tick(loop)

    def read() -> None:
        session.events.append("read")
        if is_closed_by_peer:
            heartbeats.stop()

    loop.call_soon(read)
    for _ in range(2 * TURNS_TO_READ):
        await asyncio.sleep(0)
    heartbeats.stop()
    assert session.events == (["read"] if is_closed_by_peer else ["read", "heartbeat"])


async def test_a_loop_in_time_ends_the_session_of_a_silent_peer() -> None:
    session = RecordingSession()
    heartbeats = Heartbeats(session, LIMIT_S)
    heartbeats.start(asyncio.get_running_loop())
    heartbeats.stop()
    heartbeats._tick(asyncio.get_running_loop())
    assert session.events == ["closed"]
