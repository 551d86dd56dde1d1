"""Who writes the messages of a session: the thread that sends one, or a task on the I/O loop.

[Note: turns] On a `DirectChannel`, a thread that sends a message for which somebody waits writes it itself, which
spares a call two changes of thread; in a burst, all but the first are left to the task, which joins them into one
envelope. Frames must not mix, so one of them at a time has the turn. The task that does not get it goes to sleep: it
must not block the loop. Therefore a thread that gives the turn back looks whether anything is left, and wakes the task
if that sleeps; and a task on its way to sleep clears its flag first, and then looks whether the turn has come back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from _thread import get_ident
from collections.abc import Callable
from typing import Final

from rpcdist.errors import TransportError
from rpcdist.time_limits import BURST_GAP_S
from rpcdist.transport._channels.channel import Channel, DirectChannel
from rpcdist.transport._channels.signal_shield import SignalShield, may_raise_here
from rpcdist.transport._framing.outgoing import Outgoing
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.lingering import Lingering
from rpcdist.transport.wire_messages import WireMessage, can_linger, is_urgent

logger = logging.getLogger(__name__)

FLUSH_FRAMES: Final = 32  # so many messages of a burst are written by the thread that makes them, if the loop is late
MAX_PUTS: Final = 3  # envelopes that a thread writes itself at most: a message and the first chunks of its buffers


class SessionWriter:
    """One per session.

    Args:
        io: the I/O loop.
        channel: takes the envelopes; threads write only to a `DirectChannel`.
        outgoing: the queue.
        close: ends the session, and says why; on the I/O loop.
        name: of the peer.

    Attributes:
        last_sent: when something was written last, in monotonic seconds.
        is_closed: the session has ended: nothing is written any more.
        num_written: bytes, where only the task writes.
    """

    def __init__(
        self, io: IoLoop, channel: Channel, outgoing: Outgoing, close: Callable[[str], object], name: str
    ) -> None:
        self.last_sent = time.monotonic()
        self.is_closed = False
        self.num_written = 0
        self._io = io
        self._channel = channel
        self._direct = channel if isinstance(channel, DirectChannel) else None  # asked once: the check is slow
        self._outgoing = outgoing
        self._close = close
        self._name = name
        self._lingering = Lingering(io, self.flush, lambda: outgoing.num_frames)
        self._awake = False  # the task runs, or has been told to; spares a call to the loop per message of a burst
        self._wake: asyncio.Future[None] | None = None  # the sleeping task waits for it
        self._turn = threading.Lock()  # whoever has it writes; [Note: turns]
        self._is_draining = False  # then only the task may leave the queue empty, since it tells `drain`
        self._drained: asyncio.Event = asyncio.Event()
        self._flushing = 0  # the thread that will call `flush` when it has sent
        self._main = threading.main_thread().ident
        self._shield = SignalShield()

    def __repr__(self) -> str:
        return f"<SessionWriter to {self._name} [{'awake' if self._awake else 'asleep'}]>"

    # ---------------------------------------------------------------- any thread

    def on_queued(self, message: WireMessage, transfer: int) -> None:
        """Sees to it that a message is written; any thread.

        Args:
            message: it is in the queue.
            transfer: of its large buffers, 0 if it has none.
        """
        # The message is in the queue before the flag is read, and the task clears the flag before it looks at the
        # queue for the last time: whoever comes first, one of the two sees the message.
        if self._flushing == get_ident():
            return
        if self._awake:
            if self._outgoing.num_frames >= FLUSH_FRAMES:  # the peer need not wait until the loop gets its turn
                self.flush()
        elif not transfer and can_linger(message) and self._outgoing.num_frames < FLUSH_FRAMES:
            self._lingering.begin()  # the next message takes it along, or a tick
        else:
            self._shielded(self._write_or_tell if is_urgent(message) and self._is_idle() else self._tell_task)

    def send_first(self, first: Callable[[], object] | None) -> None:
        """Calls `first`, and writes what it and others have sent: this thread is about to wait for an answer."""
        try:
            if first is not None:
                self._flushing = get_ident()
                try:
                    first()
                finally:
                    self._flushing = 0
        finally:
            if self._outgoing:
                self._write_or_tell()

    def hold_back(self, send: Callable[[], object]) -> None:
        """Calls `send`; what it sends on this thread is queued, until somebody calls `flush`."""
        self._flushing = get_ident()
        try:
            send()
        finally:
            self._flushing = 0

    def flush(self) -> None:
        """Writes what waits, on this thread if that is possible."""
        if self._outgoing:
            self._shielded(self._write_or_tell)

    def _shielded(self, act: Callable[[], object]) -> None:
        """Calls `act`, which no signal may end half way."""
        if get_ident() != self._main or not may_raise_here():
            act()
            return
        self._shield.enter()
        try:
            act()
        finally:
            self._shield.leave()

    def _write_or_tell(self) -> None:
        if not self._write_here() and not self._awake:
            self._tell_task()

    def _tell_task(self) -> None:
        self._awake = True
        self._io.call_soon(self.wake)

    def _is_idle(self) -> bool:
        """Whether nothing was written for a while: then the next message is the first of a burst, or alone."""
        return time.monotonic() - self.last_sent >= BURST_GAP_S

    def _write_here(self) -> bool:
        """Writes what waits on this thread if it may; True if nothing is left for the task. [Note: turns]"""
        channel = self._direct
        if channel is None:
            return False
        for _ in range(MAX_PUTS):
            if not self._turn.acquire(False):
                return False
            try:
                if self.is_closed or not channel.is_free:
                    return False  # the socket is full: the task waits for it, not this thread
                self.last_sent = time.monotonic()  # before the write: what other threads queue meanwhile is a burst
                parts = self._outgoing.next_parts()
                if parts is not None:
                    channel.put(*parts)
                    # And after it: where a write takes longer than the gap, each message of a burst would go alone.
                    self.last_sent = time.monotonic()
            except TransportError as exc:
                self._io.call_soon(self._failed, exc)  # the session ends on the loop; its owner hears `on_closed`
                return False
            except BaseException as exc:  # of a signal's handler, too: what has gone out is not known any more
                self._io.call_soon(self._failed, TransportError(f"writing to {self._name} was interrupted: {exc!r}"))
                raise
            finally:
                self._turn.release()
            # After the release: the task may have tried for the turn in between, and gone to sleep without it.
            if not self._outgoing:
                return channel.is_free and not self._is_draining
        return False

    # ---------------------------------------------------------------- I/O loop

    def wake(self) -> None:
        """Has the task look at the queue."""
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
                # Somebody queued, or gave the turn back, before the flag was cleared. Who has the turn now sees that.
                # Where somebody else had it, the queue may be empty, and half a frame in the channel or `drain` untold.
                if (self._outgoing or not had_turn) and not self._turn.locked():
                    self._awake = True
                    continue
                await self._wake
        except TransportError as exc:
            self._failed(exc)
        except Exception as exc:
            # A buffer that cannot be read any more (its memory was released) must not leave the peer waiting.
            logger.exception("writing to %s failed", self._name)
            self._close(f"writing failed: {exc!r}")

    async def _write_all(self) -> None:
        if self._direct is not None:
            await self._write_directly(self._direct)
        else:
            while (data := self._outgoing.next_envelope()) is not None:
                await self._channel.write(data)
                self.num_written += len(data)
                self.last_sent = time.monotonic()
        if self._outgoing.is_empty:
            self._drained.set()

    async def _write_directly(self, channel: DirectChannel) -> None:
        await channel.flush()
        while True:
            if (offer := self._outgoing.next_offer()) is not None:
                await channel.pass_segment(*offer)
                continue
            parts = self._outgoing.next_parts()
            if parts is None:  # or an offer came meanwhile, which `run` finds in the queue
                return
            await channel.write_parts(*parts)
            self.last_sent = time.monotonic()
            if parts[1] is not None:
                await asyncio.sleep(0)  # nothing above had to wait, perhaps; what arrives has its turn between chunks

    def _failed(self, error: TransportError) -> None:
        """Ends the session, with the reason that the peer gave before it closed, if there is one to be read."""
        ended = self._direct.read_out() if self._direct is not None else None
        self._close(str(ended or error))

    async def drain(self, timeout_s: float) -> bool:
        """Waits until everything queued so far has been handed to the channel; False when the time is over."""
        self._drained.clear()
        self._is_draining = True  # from now on a thread that sends wakes the task when it is done
        if self._outgoing.is_empty and not self._awake and not self._turn.locked():
            self._is_draining = False
            return True
        if not self._awake:  # what lingers is not waited for longer
            self._tell_task()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        finally:
            self._is_draining = False
        return not self.is_closed

    def end(self) -> None:
        """The session has ended."""
        self._lingering.stop()
        self._drained.set()
