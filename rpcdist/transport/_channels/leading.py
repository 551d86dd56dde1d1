"""Decides which thread reads a socket: the I/O loop, or for a while a thread that waits for a message from it.

Without this, a reply wakes the I/O loop, which wakes the thread that waits for the reply: two changes of thread, and a
contest for the interpreter's lock. A thread that *leads* sleeps on the socket instead, and decodes all messages that
arrive, its own and those of other threads.

The reader of a socket holds its lock. The loop watches an epoll instance in which the sockets are registered, instead
of the sockets. So any thread can hide a socket from the loop by one system call that wakes no other thread:

    a thread  takes the lock, or gives up; hides the socket (disarms it), sends its request, and reads until its wait is
              over; then it shows the socket again (arms it) and releases the lock
    the loop  reads when the socket is shown and the lock is free

The thread arms the socket before it releases the lock. Unread bytes in the socket then wake the loop, perhaps while the
lock is still held; the loop returns and is called again until it gets the lock, so no wake-up is lost. In the other
order, another thread could begin to lead in between, while the socket is shown to the loop.

A leader never runs user code. On the main thread, signals are held back (`signal_shield`) except during the sleep.
"""

from __future__ import annotations

import os
import select
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from typing import Final

from rpcdist.errors import BlockingInLoop
from rpcdist.time_limits import LEAVE_LIMIT_S, LONGEST_WAIT_S, READ_TURN_S, SIGNAL_CHECK_INTERVAL_S
from rpcdist.transport._channels.brief_polling import BriefPolling, may_poll
from rpcdist.transport._channels.signal_shield import SignalNoted, SignalShield
from rpcdist.transport._channels.socket_watch import CAN_WATCH, SocketWatch

CAN_LEAD: Final = CAN_WATCH and hasattr(os, "eventfd")

Sleep = tuple[Callable[[], object], Callable[[], object]]
"""Two functions that a leader calls: before each sleep, and after it."""


class Lead:
    """The right to read one socket. Made on the loop's thread, which holds it until `open` is called.

    Args:
        read: reads and delivers once; the leader calls it. It returns False when nothing more can arrive.
    """

    def __init__(self, read: Callable[[], bool]) -> None:
        self._read = read
        self._lock = allocate_lock()
        self._lock.acquire()
        self._holder = self._loop_thread = get_ident()  # the holder is 0 while no thread reads
        self._is_open = False
        self._main = threading.main_thread().ident
        self._is_stopped = False
        self._then: Callable[[], object] | None = None
        self._has_left = False
        self._is_closed = False
        self._end_lock = allocate_lock()  # around `_then`, `_has_left` and the closing of the bell
        self._shield = SignalShield()
        self._descriptor = -1
        self._watch: SocketWatch | None = None
        self._bell = -1

    def start(self, descriptor: int, watch: Callable[[int], SocketWatch]) -> bool:
        """Lets threads lead from now on; False where the system cannot do that, or has no descriptor left.

        Args:
            descriptor: the socket's.
            watch: registers the socket with the loop, which reads it unless a thread leads.
        """
        if not CAN_LEAD:
            return False
        try:
            self._watch = watch(descriptor)
        except OSError:
            return False
        self._descriptor = descriptor
        self._hide, self._show = self._watch.hide, self._watch.show
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._brief = BriefPolling(self._poller.poll, may_poll())
        return True

    # ------------------------------------------------------------ a thread that waits

    def lead(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: Sleep | None = None,
        first: Callable[[], object] | None = None,
    ) -> bool:
        """Reads until this thread's wait is over, unless another thread reads.

        Args:
            is_waiting: whether the caller still waits; called after each read and after each ring.
            timeout_s: the limit, in seconds; None for no limit.
            sleep: called around each sleep.
            first: sends the request that this thread waits for. It is always called once; if this thread leads, the
                socket is hidden before, so that the reply wakes no other thread.

        Returns:
            True if the wait is over. If False, another thread reads, the limit has passed, or the connection is about
            to end; the caller then waits in another way, for the rest of its time.

        Raises:
            BlockingInLoop: this thread already reads, and came here through a finalizer.
            BaseException: `first` raised it.
        """
        me = get_ident()
        if self._holder == me:
            raise BlockingInLoop("a wait in a finalizer", "a call on another thread")
        shield = None
        if me == self._main:
            shield = self._shield
            shield.enter()
        try:
            if self._is_stopped or not (self._lock.acquire(False) or self._acquire_from_loop()):
                if first is not None:
                    first()
                return False
            self._holder = me
            if self._bell < 0 and not self._take_bell():
                self.give_back()
                if first is not None:
                    first()
                return False
            try:
                if self._hide() < 0:
                    raise self._watch_failed()
                try:
                    if first is not None:
                        first()
                    return self._read_until(is_waiting, timeout_s, sleep, shield)
                finally:
                    if self._show() < 0 and not self._is_stopped:  # then the loop watches no more
                        raise self._watch_failed()
            finally:
                self.give_back()
        finally:
            if shield is not None:
                shield.leave()

    def _take_bell(self) -> bool:
        """Makes the bell when a thread leads for the first time: in a large world, most connections are never led."""
        try:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            return False
        self._poller.register(bell, select.POLLIN)
        self._bell = bell
        return True

    def _watch_failed(self) -> OSError:
        assert self._watch is not None
        return self._watch.failure()

    def _acquire_from_loop(self) -> bool:
        """Waits briefly for the loop: it may have just read the message that this thread waited for before."""
        return self._is_open and self._holder == self._loop_thread and self._lock.acquire(timeout=READ_TURN_S)

    def _read_until(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: Sleep | None,
        shield: SignalShield | None,
    ) -> bool:
        slice_s = LONGEST_WAIT_S if shield is None else SIGNAL_CHECK_INTERVAL_S
        left_s = slice_s if timeout_s is None or timeout_s > slice_s else timeout_s
        ends_at = 0.0  # computed only if the first sleep is not enough
        started = time.monotonic()
        brief = self._brief
        while is_waiting() and not self._is_stopped:
            if ends_at:
                left_s = min(slice_s, ends_at - time.monotonic())
                if left_s <= 0:
                    return False
            else:
                ends_at = started + (LONGEST_WAIT_S if timeout_s is None else timeout_s)
            ready = brief.try_polling() if brief.is_worth_it else []
            if not ready:
                if sleep is not None:
                    sleep[0]()
                began_ns = time.perf_counter_ns()
                try:
                    if shield is not None:
                        shield.fall_asleep()
                    ready = self._poller.poll(1000.0 * left_s)
                except SignalNoted:
                    return False
                finally:
                    if shield is not None:
                        shield.is_asleep = False
                    if sleep is not None:
                        sleep[1]()
                brief.slept(began_ns)
            for descriptor, _ in ready:
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                elif not self._read():
                    return False
        return not self._is_stopped

    def ring(self) -> None:
        """Makes a leader check whether it still waits; any thread."""
        if self._holder not in (0, get_ident()):
            with self._end_lock:
                if self._bell >= 0:
                    os.eventfd_write(self._bell, 1)

    # ------------------------------------------------------------ I/O loop

    def open(self) -> None:
        """Lets threads lead from now on."""
        self._is_open = True
        self.give_back()

    def take(self) -> bool:
        """Takes the lock for the loop, which releases it by `give_back`; False if a thread leads."""
        if not self._lock.acquire(False):
            return False
        self._holder = get_ident()
        return True

    def give_back(self) -> None:
        """Releases the lock; after `stop`, the caller keeps it for good."""
        self._holder = 0
        if self._is_stopped:
            self._leave()
            return
        self._lock.release()
        # `stop` may have been called in between, and may have given up waiting.
        if self._is_stopped and self._lock.acquire(False):
            self._leave()

    def stop(self) -> bool:
        """Ends leading for good; idempotent.

        Returns:
            Whether the loop may read and close the socket; False if a leader did not stop in time.
        """
        if not self._is_stopped:
            self._is_stopped = True
            if self._holder == get_ident():  # the loop is reading, and learns of the end from a frame
                self._leave()
            else:
                self.ring()
                if self._lock.acquire(timeout=LEAVE_LIMIT_S):
                    self._leave()
        return self._has_left

    def close(self, then: Callable[[], object]) -> None:
        """After `stop`: calls `then` once no thread reads: now, or on the thread of a leader that stops late."""
        with self._end_lock:
            self._then = then
            has_left = self._has_left
        if has_left:
            self._end()

    def _leave(self) -> None:
        """Called by the holder of the lock after `stop`, who keeps it."""
        with self._end_lock:
            self._has_left = True
        self._end()

    def _end(self) -> None:
        with self._end_lock:
            then, self._then = self._then, None
            if then is None or self._is_closed:
                return
            self._is_closed = True
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1
        if self._watch is not None:
            self._watch.close()
        then()
