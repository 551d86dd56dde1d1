"""Writes the messages of a session: on the thread that sends one, or in a task on the I/O loop.

[Note: turns] On a `SocketChannel`, a thread that sends an urgent message writes it itself, which saves a call two
thread switches. In a burst, the thread leaves all messages after the first to the task, which joins them into one
envelope. Only the holder of `_turn` may write, so frames never interleave. If the task cannot take the turn, it sleeps
instead of blocking the loop. Therefore a thread that releases the turn checks the queue again and wakes the task if it
is asleep; and a task that is about to sleep first clears its flag, and then checks whether the turn is free again.

[Note: lingering] `remote()` returns at once, and a `to_here()` usually follows. So the message of a `remote()` stays in
the queue until another message is written, in the same envelope, or until the next tick. The first lingering message
starts the ticks on the I/O loop, which continue while messages linger, so a thread that makes many references does not
wake the loop for each. A tick takes the interpreter away from calling threads. If a tick finds no message,
the period of the ticks doubles; the first lingering message resets it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from _thread import get_ident
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rpcdist._proto import rpc_pb2
from rpcdist.errors import TransportError, described_error
from rpcdist.time_limits import BATCH_DELAY_S, BURST_GAP_S, POLL_S
from rpcdist.transport._channels.channel import ReadChannel
from rpcdist.transport._channels.polling_and_signals import SignalShield
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.wire_messages import CallMessage, WireMessage
from rpcdist.waiters import ends_within

logger = logging.getLogger(__name__)

NUM_IDLE_TICKS: Final = 4  # ticks without a lingering message, after which the ticks end


FLUSH_FRAMES: Final = 32  # at this length of the queue a sending thread writes, because the loop is late
MAX_PUTS: Final = 3  # limit on envelopes that a thread writes itself: a message and the first chunks of its buffers


def is_urgent(message: WireMessage) -> bool:
    """Whether the message deserves its own write, so that the peer can begin at once."""
    if not isinstance(message, rpc_pb2.Message):
        return True
    return message.HasField("autograd") and not message.control_seq


@dataclass(eq=False, repr=False)
class SessionWriter:
    """The writer of one session.

    Args:
        channel: carries the envelopes; threads write only to a `SocketChannel`.
        close: ends the session with a reason; on the I/O loop.

    Attributes:
        last_sent: when something was written last, in monotonic seconds.
        is_closed: whether the session has ended, so that nothing is written any more.
        num_written: bytes written by the task, if only the task writes.
    """

    _io: IoLoop
    _channel: ReadChannel | SocketChannel
    _outgoing: Outgoing
    _close: Callable[[str], object]
    _name: str
    last_sent: float = field(default_factory=time.monotonic)
    is_closed: bool = False
    num_written: int = 0
    _has_news: bool = False  # a message has begun to linger since the last tick
    _ticks: bool = False
    _num_idle: int = 0  # ticks
    _awake: bool = False  # the task runs or was woken; saves a call to the loop per message of a burst
    _wake: asyncio.Future[None] | None = None  # the sleeping task waits for it
    _turn: threading.Lock = field(default_factory=threading.Lock)  # its holder writes; [Note: turns]
    _is_draining: bool = False  # then only the task may empty the queue, since it notifies `drain`
    _drained: asyncio.Event = field(default_factory=asyncio.Event)
    _flushing: int = 0  # the id of the thread that is sending and will call `flush` afterwards
    _shield: SignalShield = field(default_factory=SignalShield)

    def __post_init__(self) -> None:
        self._direct = self._channel if isinstance(self._channel, SocketChannel) else None
        # [Note: lingering]
        self._tick_s = BATCH_DELAY_S

    # ---------------------------------------------------------------- any thread

    def on_queued(self, message: WireMessage, transfer: int) -> None:
        """Ensures that a queued message is written; any thread.

        Args:
            transfer: number of the transfer of its large buffers, 0 if it has none.
        """
        # The message is queued before the flag is read, and the task clears the flag before it last checks the queue.
        # So in any order, this thread or the task sees the message.
        if self._flushing == get_ident():
            return
        is_remote = message.__class__ is CallMessage and message.result is not None
        if self._awake:
            if self._outgoing.num_frames >= FLUSH_FRAMES:  # otherwise the peer would wait for the loop
                self.flush()
        elif not transfer and is_remote and self._outgoing.num_frames < FLUSH_FRAMES:
            self._linger()  # the next message or a tick writes it: the caller will probably ask for the value
        else:
            self._shield.run(self._write_or_wake if is_urgent(message) and self._is_idle() else self._wake_task)

    def _linger(self) -> None:
        # The flag is set before the ticks are checked; a tick that ends them clears `_ticks` before its last check of
        # the flag.
        self._has_news = True
        if not self._ticks:
            self._ticks = True
            self._io.call_soon(self._wait_for_tick)

    def write_after(self, send: Callable[[], object] | None) -> None:
        """Calls `send`, then writes the queue, since this thread is about to wait for an answer."""
        try:
            if send is not None:
                self._flushing = get_ident()
                try:
                    send()
                finally:
                    self._flushing = 0
        finally:
            if self._outgoing:
                self._write_or_wake()

    def hold_back(self, send: Callable[[], object]) -> None:
        """Calls `send`; messages that it sends on this thread stay in the queue until a `flush`."""
        before, self._flushing = self._flushing, get_ident()
        try:
            send()
        finally:
            self._flushing = before

    def flush(self) -> None:
        """Writes the queue, on this thread if that is possible."""
        if self._outgoing:
            self._shield.run(self._write_or_wake)

    def _write_or_wake(self) -> None:
        if not self._write_here() and not self._awake:
            self._wake_task()

    def _wake_task(self) -> None:
        self._awake = True
        self._io.call_soon(self.wake)

    def _is_idle(self) -> bool:
        """Whether nothing was written for a while, so that the next message is alone or the first of a burst."""
        return time.monotonic() - self.last_sent >= BURST_GAP_S

    def _write_here(self) -> bool:
        """Writes the queue on this thread if it may; True if nothing is left for the task. [Note: turns]"""
        channel = self._direct
        if channel is None:
            return False
        for _ in range(MAX_PUTS):
            if not self._turn.acquire(False):
                return False
            try:
                if self.is_closed or not channel.is_free:
                    return False  # the socket is full: the task waits for it, not this thread
                self.last_sent = time.monotonic()  # before the write: messages queued meanwhile are a burst
                parts = self._outgoing.next_parts()
                if parts is not None:
                    channel.put(*parts)
                    # And after it: if a write takes longer than the gap, each message of a burst would be sent alone.
                    self.last_sent = time.monotonic()
            except TransportError as exc:
                self._io.call_soon(self._failed, exc)  # the session ends on the loop, which calls `on_closed`
                return False
            except BaseException as exc:  # even a signal handler's: the number of bytes sent is unknown
                self._io.call_soon(
                    self._failed, TransportError(f"writing to {self._name} was interrupted: {described_error(exc)}")
                )
                raise
            finally:
                self._turn.release()
            # After the release: the task may have failed to take the turn in between, and be asleep.
            if not self._outgoing:
                return channel.is_free and not self._is_draining
        return False

    # ---------------------------------------------------------------- I/O loop

    def wake(self) -> None:
        """Wakes the task, which then checks the queue."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def run(self) -> None:
        """The task; it ends with the session, or ends it."""
        try:
            while True:
                had_turn = self._turn.acquire(blocking=False)
                if had_turn:
                    try:
                        await self._write_all()
                    finally:
                        self._turn.release()
                self._wake = self._io.loop.create_future()
                self._awake = False
                # A thread may have queued a message, or released the turn, before the flag was cleared. The current
                # holder of the turn sees that. If the task did not have the turn, the queue may be empty while half a
                # frame is in the channel, or `drain` was not notified.
                later: asyncio.TimerHandle | None = None
                if (self._outgoing or not had_turn) and not self._turn.locked():
                    if not self._outgoing.waits:
                        self._awake = True
                        continue
                    later = self._io.loop.call_later(POLL_S, self.wake)
                await self._wake
                if later is not None:  # otherwise each wake in between would leave one more chain of timers
                    later.cancel()
        except TransportError as exc:
            self._failed(exc)
        except Exception as exc:
            # If a buffer cannot be read any more (its memory was released), the peer must not wait forever.
            logger.exception("writing to %s failed", self._name)
            self._close(f"writing failed: {described_error(exc)}")

    async def _write_all(self) -> None:
        channel = self._channel
        if isinstance(channel, SocketChannel):
            await self._write_directly(channel)
        else:
            while (data := self._outgoing.next_envelope()) is not None:
                await channel.write(data)
                self.num_written += len(data)
                self.last_sent = time.monotonic()
        if self._outgoing.is_empty:
            self._drained.set()

    async def _write_directly(self, channel: SocketChannel) -> None:
        await channel.flush()
        while True:
            if (offer := self._outgoing.next_offer()) is not None:
                await channel.pass_segment(*offer)
                continue
            parts = self._outgoing.next_parts()
            if parts is None:  # or an offer was queued meanwhile, which `run` finds
                return
            await channel.write_parts(*parts)
            self.last_sent = time.monotonic()
            if parts[1] is not None:
                await asyncio.sleep(0)  # the calls above may not have yielded; the loop reads between two chunks

    def _failed(self, error: TransportError) -> None:
        """Ends the session, with the peer's reason for closing if there is an unread one."""
        ended = self._direct.read_out() if self._direct is not None else None
        self._close(str(ended or error))

    async def drain(self, timeout_s: float) -> bool:
        """Waits until everything queued so far has been passed to the channel; False on timeout."""
        self._drained.clear()
        self._is_draining = True  # from now on, a sending thread also wakes the task
        if self._outgoing.is_empty and not self._awake and not self._turn.locked():
            self._is_draining = False
            return True
        if not self._awake:  # lingering messages are written now
            self._wake_task()
        try:
            return await ends_within(self._drained.wait(), timeout_s) and not self.is_closed
        finally:
            self._is_draining = False

    def end(self) -> None:
        """Ends the ticks and `drain`, since the session has ended."""
        self.is_closed = True
        self._drained.set()

    def _wait_for_tick(self) -> None:
        if not self.is_closed:
            self._io.loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        if self.is_closed:
            return
        if self._has_news:
            self._has_news = False
            self._num_idle = 0
            if self._outgoing.num_frames:
                self._tick_s = BATCH_DELAY_S
                self.flush()
            else:
                self._tick_s = min(2 * self._tick_s, 4 * BATCH_DELAY_S)
        else:
            self._num_idle += 1
            if self._num_idle >= NUM_IDLE_TICKS:
                self._num_idle = 0
                self._ticks = False
                if not self._has_news:
                    return
                self._ticks = True
        self._wait_for_tick()
