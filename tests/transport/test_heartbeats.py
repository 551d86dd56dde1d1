"""Heartbeats of a process that stood still: it reads before it speaks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcdist.ids import Identity
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import TURNS_TO_READ, NullHandler, Session

LIMIT_S = 40.0
LONG_AGO = float("-inf")


class RecordingSession(Session):
    """A session that nothing carries; `events` has its effects."""

    def __init__(self) -> None:
        self.events: list[str] = []
        io = cast(IoLoop, SimpleNamespace(loop=asyncio.get_running_loop()))
        channel, peer = cast(SocketChannel, None), Identity("peer", 1, 1)
        options: dict[str, Any] = {"role": "r", "id": b"", "handler": NullHandler(), "opened_by_me": True}
        super().__init__(io, channel, peer, silence_limit_s=LIMIT_S, **options)
        self.last_received = self._writer.last_sent = LONG_AGO

    def beat(self, late_s: float = 0.0) -> None:
        """As its timer does, perhaps too late."""
        self._schedule_heartbeat()
        self.stop()
        self._heartbeat_due -= late_s
        self._heartbeat()

    def stop(self) -> None:
        self._stop_heartbeats()

    def send(self, message: object, buffers: object = ()) -> int:
        self.events.append("heartbeat")
        return 0

    def close(self, reason: str) -> None:
        self.events.append("closed")


@pytest.mark.parametrize("is_closed_by_peer", [False, True])
async def test_a_loop_that_was_held_up_reads_before_it_speaks(is_closed_by_peer: bool) -> None:
    """With the heartbeat first, a connection that the peer has closed meanwhile would look as good as any."""
    session = RecordingSession()
    loop = asyncio.get_running_loop()
    session.beat(late_s=LIMIT_S)

    def read() -> None:
        session.events.append("read")
        if is_closed_by_peer:
            session.stop()

    loop.call_soon(read)
    for _ in range(2 * TURNS_TO_READ):
        await asyncio.sleep(0)
    session.stop()
    assert session.events == (["read"] if is_closed_by_peer else ["read", "heartbeat"])


async def test_a_loop_in_time_ends_the_session_of_a_silent_peer() -> None:
    session = RecordingSession()
    session.beat()
    assert session.events == ["closed"]
