"""Between the part of a worker that looks for the next coordinator, and those that wait for it with a call."""

from __future__ import annotations

import asyncio
import time

from rpcdist.deadline import Deadline
from rpcdist.rpc._peers.peer_events import Event
from rpcdist.time_limits import ASK_COORDINATOR_LIMIT_S


class CoordinatorSearch:
    """One per agent, on the I/O loop.

    Who looks makes attempts, with pauses between them. A call to the lost coordinator cuts the pause short, and waits
    for the next attempt: the next coordinator may be there already.

    Attributes:
        requested: somebody waits for an attempt.
    """

    def __init__(self) -> None:
        self.requested: Event[[]] = Event()
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._num_begun = 0
        self._num_ended = 0
        self._num_found = 0
        self._is_answered = False

    def __repr__(self) -> str:
        return f"<CoordinatorSearch {self._num_begun} attempts, {self._num_found} in success>"

    # ------------------------------------------------------------ who looks

    def begin(self) -> None:
        """An attempt begins."""
        self._wanted.clear()
        self._num_begun += 1

    def answered(self) -> None:
        """Another coordinator is there; it may still have to wait for others before it takes this worker back."""
        self._is_answered = True
        self._changed.set()

    def end(self, found: bool) -> None:
        """The attempt is over."""
        self._is_answered = False
        self._num_ended = self._num_begun
        self._num_found += found
        self._changed.set()

    async def pause(self, pause_s: float) -> None:
        """Between two attempts."""
        try:
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        except TimeoutError:
            pass  # nobody was in a hurry

    # ------------------------------------------------------------ who waits

    def hurry(self) -> None:
        """Has an attempt made now."""
        self._wanted.set()
        self.requested.publish()

    async def attempt(self, deadline: Deadline) -> bool:
        """Waits until the coordinator is found, or one attempt that begins now or later has failed.

        If nobody answers for `ASK_COORDINATOR_LIMIT_S`, as where a host is silent, it waits no longer; but once another
        coordinator has answered, it waits until that one has taken this worker back, at most until the deadline.

        Returns:
            Whether it was found.
        """
        goal, found = self._num_begun + 1, self._num_found
        silent_until = time.monotonic() + ASK_COORDINATOR_LIMIT_S
        self.hurry()
        while self._num_found == found and self._num_ended < goal:
            limit_s = deadline.remaining_s()
            if not self._is_answered:
                limit_s = min(limit_s, silent_until - time.monotonic())
            if limit_s <= 0:
                break
            self._changed.clear()
            try:
                async with asyncio.timeout(None if limit_s == float("inf") else limit_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # the conditions above say whether that was all the time
        return self._num_found != found
