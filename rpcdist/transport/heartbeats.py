"""Signs of life of a session. Silence is how a dead host is told from an idle one: it closes no connection.

So both sides speak regularly, and each counts the other as lost when it has heard nothing for too long.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.time_limits import HEARTBEATS_PER_PEER_TIMEOUT

TURNS_TO_READ = 3
"""Of an I/O loop that was held up: what has arrived is read in the first, and connections that ended by that are dealt
with in the next."""


class WatchedSession(Protocol):
    """A session, as its heartbeats see it. Times are monotonic seconds."""

    last_received: float

    @property
    def last_sent(self) -> float:
        """When something was written last."""

    def has_unread(self) -> bool:
        """Whether there is a sign of life that whoever reads has not read yet, held up perhaps."""

    def send(self, message: rpc_pb2.Message, /) -> Any:
        """Sends a message."""

    def close(self, reason: str, /) -> None:
        """Ends the session."""

    def trim(self, now: float, /) -> None:
        """Gives back memory that was not used for long."""


class Heartbeats:
    """Runs on the I/O loop, from `start` to `stop`.

    Args:
        session: sends, and is ended when the peer is silent.
        silence_limit_s: the peer counts as lost after so many seconds without a sign of life.
    """

    def __init__(self, session: WatchedSession, silence_limit_s: float) -> None:
        self._session = session
        self._silence_limit_s = silence_limit_s
        self._interval_s = silence_limit_s / HEARTBEATS_PER_PEER_TIMEOUT
        self._due = 0.0
        self._handle: asyncio.Handle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedules the next tick."""
        self._due = loop.time() + self._interval_s
        self._handle = loop.call_at(self._due, self._tick, loop)

    def stop(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            self._handle.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop, num_turns: int = 0) -> None:
        session, now = self._session, time.monotonic()
        late = loop.time() - self._due
        if late >= self._interval_s and num_turns < TURNS_TO_READ:
            # What came meanwhile is read first: a peer may have closed the connection, which shall not look used then.
            self._handle = loop.call_soon(self._tick, loop, num_turns + 1)
            return
        silence = now - session.last_received
        # A loop that was itself held up has not read what may lie in its socket; it judges nobody in this round.
        if silence > self._silence_limit_s and late < self._interval_s and not session.has_unread():
            session.close(f"no sign of life for {silence:.1f} s")
            return
        session.trim(now)
        # Not 1.0: a message sent just after the last tick would put the heartbeat off by nearly a whole interval.
        if now - session.last_sent >= self._interval_s * 0.9:
            session.send(rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat()))
        self.start(loop)
