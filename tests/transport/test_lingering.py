"""When messages that linger are written. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from rpcdist.time_limits import BATCH_DELAY_S
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session_writer import NUM_IDLE_TICKS, SessionWriter


class Loop:
    """The part that lingering uses of the I/O loop.

    Attributes:
        delays_s: of the ticks so far.
        next: what the loop does next.
    """

    def __init__(self) -> None:
        self.loop = cast(asyncio.AbstractEventLoop, self)
        self.delays_s: list[float] = []
        self.next: Callable[[], object] | None = None

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments)

    def call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        self.delays_s.append(delay_s)
        self.next = function

    def tick(self) -> bool:
        """Whether there was one."""
        function, self.next = self.next, None
        if function is not None:
            function()
        return function is not None


class Queue(SessionWriter):
    """The messages that linger, and how many writes there were of them by ticks."""

    def __init__(self) -> None:
        self.io = Loop()
        self.num_frames = self.num_writes = 0
        super().__init__(cast(IoLoop, self.io), cast(SocketChannel, None), cast(Outgoing, self), print, "peer")

    def put(self) -> None:
        self.num_frames += 1
        self._linger()

    def flush(self) -> None:
        self.num_frames = 0
        self.num_writes += 1


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_a_message_that_nothing_takes_along_is_written_by_the_next_tick(queue: Queue) -> None:
    for number in range(1, 4):
        queue.put()
        assert queue.io.tick() and queue.num_writes == number
    assert set(queue.io.delays_s) == {BATCH_DELAY_S}


def test_ticks_end_when_nothing_lingers(queue: Queue) -> None:
    queue.put()
    assert [queue.io.tick() for _ in range(NUM_IDLE_TICKS + 2)] == [True] * (NUM_IDLE_TICKS + 1) + [False]
    queue.put()
    assert queue.io.tick() and queue.num_writes == 2


def test_ticks_come_less_often_while_all_messages_are_taken_along(queue: Queue) -> None:
    for _ in range(10):
        queue.put()
        queue.num_frames = 0  # the next message took it along
        queue.io.tick()
    assert queue.num_writes == 0
    assert queue.io.delays_s[:4] == [BATCH_DELAY_S, 2 * BATCH_DELAY_S, 4 * BATCH_DELAY_S, 4 * BATCH_DELAY_S]
    assert max(queue.io.delays_s) == 4 * BATCH_DELAY_S
    queue.put()  # this one is not
    queue.io.tick()
    assert queue.num_writes == 1 and queue.io.delays_s[-1] == BATCH_DELAY_S


def test_no_tick_after_the_end(queue: Queue) -> None:
    queue.put()
    queue.end()
    assert queue.io.tick() and not queue.io.tick() and queue.num_writes == 0
