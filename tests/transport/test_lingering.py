"""When messages that linger are written. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcdist.time_limits import BATCH_DELAY_S
from rpcdist.transport import session_writer
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session_writer import NUM_IDLE_TICKS, SessionWriter

LONG_S = 60.0


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


class Uncopied(Outgoing):
    """A queue whose next chunk a device has not copied yet."""

    waits = True

    def __bool__(self) -> bool:
        return True


def test_a_writer_that_waits_for_a_device_has_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wake in between left one more chain of timers, until the loop did nothing else."""
    monkeypatch.setattr(session_writer, "POLL_S", LONG_S)

    async def wake_often() -> int:
        loop = asyncio.get_running_loop()
        handles: list[asyncio.TimerHandle] = []
        later = loop.call_later

        def call_later(delay_s: float, function: Callable[[], object]) -> asyncio.TimerHandle:
            handles.append(later(delay_s, function))
            return handles[-1]

        monkeypatch.setattr(loop, "call_later", call_later)
        channel = cast(SocketChannel, object())
        writer = SessionWriter(cast(IoLoop, SimpleNamespace(loop=loop)), channel, Uncopied(), print, "peer")
        task = asyncio.create_task(writer.run())
        for _ in range(5):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writer.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        assert len(handles) > 5
        return sum(not handle.cancelled() for handle in handles)

    assert asyncio.run(wake_often()) == 1
