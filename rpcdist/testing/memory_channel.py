"""A channel between two workers of one process, and the state of the path that its envelopes take."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from rpcdist.errors import TransportError
from rpcdist.inspection import ChannelFacts

__all__ = ["MemoryChannel", "Path", "channel_pair"]


class Path:
    """The way from one worker to another: delay, loss and cuts of everything that is sent on it. Used on the I/O loop.

    Attributes:
        delay_s: how much later it arrives, in seconds.
        drops: whether it disappears, as behind a firewall that answers nothing.
    """

    __slots__ = ("_num_intact", "_on_break", "_timer", "_under_way", "delay_s", "drops")

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.drops = False
        self._num_intact = 0
        self._on_break: Callable[[], object] | None = None
        self._under_way: deque[tuple[float, MemoryChannel, bytes | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def break_after(self, num_envelopes: int, on_break: Callable[[], object]) -> None:
        """So many more envelopes arrive; the next one does not, nor anything behind it, and `on_break` is called."""
        self._num_intact, self._on_break = num_envelopes, on_break

    def carry(self, channel: MemoryChannel, data: bytes | None) -> None:
        """Has data arrive at the far end of a channel, in order; None is the end of the channel."""
        if self._on_break is not None and data is not None:
            self._num_intact -= 1
            if self._num_intact < 0:
                self.drops = True
                on_break, self._on_break = self._on_break, None
                on_break()
        if self.drops:
            channel.has_lost = True
            return
        due = time.monotonic() + self.delay_s
        if self._under_way:
            due = max(due, self._under_way[-1][0])  # a path that got faster does not overtake itself
        self._under_way.append((due, channel, data))
        if self._timer is None:
            self._deliver()

    def _deliver(self) -> None:
        """Delivers what is due, and waits for the rest. A timer of the loop may ring some milliseconds early."""
        self._timer = None
        while self._under_way:
            wait_s = self._under_way[0][0] - time.monotonic()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._deliver)
                return
            _, channel, data = self._under_way.popleft()
            channel.arrive(data)


class MemoryChannel:
    """One end of a channel; see `Channel`. Used on the I/O loop.

    Args:
        path: what it writes takes this path.

    Attributes:
        has_lost: whether something that was on its way to this end has disappeared.
    """

    def __init__(self, path: Path) -> None:
        self.has_lost = False
        self.facts = ChannelFacts("", "", False, "memory")
        self._path = path
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._reason: str | None = None
        self._far: MemoryChannel

    async def read(self) -> bytes | None:
        data = await self._arrived.get()
        if self._reason is not None:
            raise TransportError(self._reason)
        return data

    async def write(self, data: bytes) -> None:
        if self._reason is not None:
            raise TransportError(self._reason)
        self._path.carry(self._far, bytes(data))
        await asyncio.sleep(0)  # the reader gets a turn, as with a socket that is full

    def abort(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            self._arrived.put_nowait(None)
            self._path.carry(self._far, None)

    def arrive(self, data: bytes | None) -> None:
        """Something has come from the far end; None says that it has closed the channel."""
        self._arrived.put_nowait(data)


def channel_pair(there: Path, back: Path) -> tuple[MemoryChannel, MemoryChannel]:
    """The two ends of a new channel: what the first one writes goes `there`, the other one's envelopes come `back`."""
    near, far = MemoryChannel(there), MemoryChannel(back)
    near._far, far._far = far, near
    return near, far
