"""Messages that nobody waits for alone: they stay in the queue until the next message takes them along, or a tick.

`remote()` returns at once, and what follows is mostly a `to_here()`: the two leave in one write, and arrive in one. The
first message that lingers starts ticks on the I/O loop, which go on while messages linger; so a thread that makes many
references does not wake the loop for each of them.

A tick takes the interpreter from the threads that call, which costs them 100 us and more. Where each message was taken
along before its tick came, the ticks come half as often, again and again; with the first one that was not, they come in
time again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rpcdist.time_limits import LINGER_S, LONGEST_LINGER_S
from rpcdist.transport.io_loop import IoLoop

NUM_IDLE_TICKS: Final = 4  # without a message that lingers; then the ticks end


class Lingering:
    """One per session.

    Args:
        io: the I/O loop, where the ticks are.
        flush: writes what waits; called there.
        num_waiting: how many messages do.
    """

    def __init__(self, io: IoLoop, flush: Callable[[], object], num_waiting: Callable[[], int]) -> None:
        self._io = io
        self._flush = flush
        self._num_waiting = num_waiting
        self._period_s = LINGER_S
        self._has_news = False  # a message has begun to linger since the last tick
        self._ticks = False
        self._num_idle = 0
        self._is_stopped = False

    def __repr__(self) -> str:
        return f"<Lingering [{'stopped' if self._is_stopped else 'ticks' if self._ticks else 'at rest'}]>"

    def begin(self) -> None:
        """A message was queued that shall linger; any thread."""
        # The note comes before the look at the ticks, which end before they look at the note for the last time.
        self._has_news = True
        if not self._ticks:
            self._ticks = True
            self._io.call_soon(self._wait)

    def stop(self) -> None:
        """The session has ended; on the I/O loop."""
        self._is_stopped = True

    def _wait(self) -> None:
        if not self._is_stopped:
            self._io.loop.call_later(self._period_s, self._tick)

    def _tick(self) -> None:
        if self._is_stopped:
            return
        if self._has_news:
            self._has_news = False
            self._num_idle = 0
            if self._num_waiting():
                self._period_s = LINGER_S
                self._flush()
            else:
                self._period_s = min(2 * self._period_s, LONGEST_LINGER_S)
        else:
            self._num_idle += 1
            if self._num_idle >= NUM_IDLE_TICKS:
                self._num_idle = 0
                self._ticks = False
                if not self._has_news:
                    return
                self._ticks = True
        self._wait()
