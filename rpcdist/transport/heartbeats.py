"""Signs of life of a session. A dead host closes no connection, so only silence distinguishes it from an idle host.

Both sides therefore send regularly, and each treats the other as lost after too long a silence.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from rpcdist._proto import rpc_pb2
from rpcdist.time_limits import HEARTBEATS_PER_PEER_TIMEOUT

TURNS_TO_READ = 3
"""Turns that a delayed I/O loop takes before it judges its peers: it reads arrived data in the first turn, and handles
connections that ended in the next."""


class WatchedSession(Protocol):
    """The interface of a session to its heartbeats. Times are monotonic seconds."""

    last_received: float

    @property
    def last_sent(self) -> float:
        """The time of the last write."""

    def has_unread(self) -> bool:
        """Whether bytes have arrived that were not read yet: the reader may be delayed."""

    def send(self, message: rpc_pb2.Message, /) -> Any:
        """Sends a message."""

    def close(self, reason: str, /) -> None:
        """Ends the session."""

    def trim(self, now: float, /) -> None:
        """Frees memory that was not used for a long time."""


class Heartbeats:
    """Runs on the I/O loop, from `start` to `stop`.

    Args:
        session: sends the heartbeats, and is closed when the peer is silent.
        silence_limit_s: after this time without a sign of life, in seconds, the peer counts as lost.
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
            # First the loop reads the data that arrived meanwhile: a peer may have closed the connection, which must
            # not look alive then.
            self._handle = loop.call_soon(self._tick, loop, num_turns + 1)
            return
        silence = now - session.last_received
        # A loop that was delayed itself may have unread data in its socket, so it judges no peer in this round.
        if silence > self._silence_limit_s and late < self._interval_s and not session.has_unread():
            session.close(f"no sign of life for {silence:.1f} s")
            return
        session.trim(now)
        # Not 1.0: a message sent just after the last tick would delay the heartbeat by nearly a whole interval.
        if now - session.last_sent >= self._interval_s * 0.9:
            session.send(rpc_pb2.Message(heartbeat=rpc_pb2.Heartbeat()))
        self.start(loop)
