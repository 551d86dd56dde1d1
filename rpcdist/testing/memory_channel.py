"""A channel between two workers of one process, and the state of the path that its envelopes take."""

from __future__ import annotations

import asyncio
import time

from rpcdist.errors import TransportError

__all__ = ["MemoryChannel", "Path", "channel_pair"]


class Path:
    """What happens to everything that one worker sends to another one. Used on the I/O loop.

    Attributes:
        delay_s: how much later it arrives, in seconds.
        drops: whether it disappears, as behind a firewall that answers nothing.
    """

    __slots__ = ("_due", "delay_s", "drops")

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.drops = False
        self._due = 0.0

    def carry(self, channel: MemoryChannel, data: bytes | None) -> None:
        """Has data arrive at the far end of a channel, in order; None is the end of the channel."""
        if self.drops:
            channel.has_lost = True
            return
        now = time.monotonic()
        self._due = max(self._due, now + self.delay_s)  # a path that got faster does not overtake itself
        if self._due <= now:
            channel.arrive(data)
        else:
            asyncio.get_running_loop().call_later(self._due - now, channel.arrive, data)


class MemoryChannel:
    """One end of a channel; see `Channel`. Used on the I/O loop.

    Args:
        path: what it writes takes this path.

    Attributes:
        has_lost: whether something that was on its way to this end has disappeared.
    """

    def __init__(self, path: Path) -> None:
        self.has_lost = False
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
