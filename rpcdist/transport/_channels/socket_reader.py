"""Decides which thread reads a socket: the I/O loop, or for a while a thread that waits for a message from it.

Without this, a reply wakes the I/O loop, which wakes the thread that waits for the reply: two thread switches, and
contention for the interpreter's lock. A waiting thread that *reads* sleeps on the socket instead, and decodes all
messages that arrive, its own and those of other threads.

The reader of a socket holds its lock. The loop watches an epoll instance in which the sockets are registered, instead
of the sockets. So any thread can disarm a socket in it with one system call that wakes no other thread:

    a thread  tries to take the lock; disarms the socket, sends its request, and reads until its wait is over;
              then it arms the socket again and releases the lock
    the loop  reads when the socket is armed and the lock is free

The thread arms the socket before it releases the lock. Unread bytes in the socket then wake the loop, perhaps while the
lock is still held; the loop returns and is called again until it gets the lock, so no wake-up is lost. In the other
order, another thread could begin to read in between, while the loop watches the socket.

A reading thread may also read other sockets that no thread reads, until its wait ends: a call to many workers reads
their replies without a thread switch for each.

A reading thread runs no user code. On the main thread, signals are deferred (`SignalShield`) except during the sleep.

[Note: keeping the lock] `select.epoll.modify` releases the interpreter's lock around its system call, which takes a
microsecond. If many threads make calls, another thread takes the lock in between, and the thread that has just armed
its socket must queue for it before it can release the socket's lock. Meanwhile the loop wakes up again and again and
finds the socket's lock taken: with 8 calling threads, four times per call. `ctypes.PyDLL` keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import select
import sys
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final

from rpcdist.errors import BlockingInLoop
from rpcdist.time_limits import LEAVE_LIMIT_S, LONGEST_WAIT_S, READ_TURN_S, SIGNAL_CHECK_INTERVAL_S
from rpcdist.transport._channels.polling_and_signals import BriefPolling, SignalNoted, SignalShield, may_poll

_MODIFY: Final = 3  # EPOLL_CTL_MOD
_MOST_AT_ONCE: Final = 8
"""Sockets read before the loop may do other work. The kernel then queues them behind the others, so all have turns."""
_EVENT_BYTES: Final = 16  # size of a `struct epoll_event`, or 12 where it is packed
_DATA_AT: Final = 4 if platform.machine() in ("x86_64", "i686", "i386") else 8  # offset of the descriptor in it


def _epoll_ctl() -> Any:
    function = ctypes.PyDLL(None, use_errno=True).epoll_ctl
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
    return function


_control: Final = _epoll_ctl()
_READABLE: Final = select.EPOLLIN


def _event(mask: int, descriptor: int) -> bytes:
    """The event that `select.epoll.modify` would make; its data identifies the socket in the result of `poll`."""
    event = bytearray(_EVENT_BYTES)
    event[:4] = mask.to_bytes(4, sys.byteorder)
    event[_DATA_AT : _DATA_AT + 4] = descriptor.to_bytes(4, sys.byteorder)
    return bytes(event)


Watch = tuple[Callable[[], int], Callable[[], int]]
"""Disarms a socket in an epoll instance, and arms it again, at once if there are unread bytes. Both return a negative
number on failure, and set `errno`. They call the C library directly: every call disarms and arms its socket."""


def watched(epoll: select.epoll, descriptor: int) -> Watch:
    """Registers a socket, which is armed at first. Raises `OSError` if the system has no memory left for it."""
    epoll.register(descriptor, select.EPOLLIN)
    number = epoll.fileno()
    return (
        partial(_control, number, _MODIFY, descriptor, _event(0, descriptor)),
        partial(_control, number, _MODIFY, descriptor, _event(_READABLE, descriptor)),
    )


def watch_failure() -> OSError:
    """The error of a function of a `Watch`, right after it returned a negative number on this thread."""
    return OSError(ctypes.get_errno(), "the event mask of a connection cannot be changed (epoll_ctl)")


class WatchedSockets:
    """The sockets of one event loop that threads may disarm. The loop watches their common epoll instance.

    One instance per socket would save a system call, but cost a descriptor per connection: at rank 0, one for each
    worker of the world. Used on the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.epoll = select.epoll()
        self._loop = loop
        self._on_ready: dict[int, tuple[Context, Callable[[], object]]] = {}
        loop.add_reader(self.epoll.fileno(), self._read)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> WatchedSockets:
        """The sockets of a loop; raises `OSError` if no descriptor is free for the epoll instance."""
        found = _of_loops.get(loop)
        if found is None:
            found = _of_loops[loop] = cls(loop)
        return found

    def add(self, descriptor: int, on_ready: Callable[[], object]) -> Watch:
        """Registers a function to be called whenever an armed socket has unread bytes."""
        watch = watched(self.epoll, descriptor)
        self._on_ready[descriptor] = copy_context(), on_ready
        return watch

    def remove(self, descriptor: int) -> None:
        """Ends the watch of a socket; the last removal closes the epoll instance."""
        if self._on_ready.pop(descriptor, None) is None:
            return
        with suppress(OSError):  # the socket was closed
            self.epoll.unregister(descriptor)
        if not self._on_ready:
            del _of_loops[self._loop]
            self._loop.remove_reader(self.epoll.fileno())
            self.epoll.close()

    def _read(self) -> None:
        began = time.monotonic()
        ready = [(0, 0)] * _MOST_AT_ONCE
        while len(ready) == _MOST_AT_ONCE and time.monotonic() - began < READ_TURN_S:
            ready = self.epoll.poll(0, _MOST_AT_ONCE)
            for descriptor, _ in ready:
                if (found := self._on_ready.get(descriptor)) is not None:
                    found[0].run(found[1])
                if self.epoll.closed:
                    return


_of_loops: Final[dict[asyncio.AbstractEventLoop, WatchedSockets]] = {}
"""One entry for each loop that has such sockets."""


Sleep = tuple[Callable[[], object], Callable[[], object]]
"""Two functions that a reading thread calls: before each sleep, and after it."""

Waits = Callable[[], bool]
"""Whether a thread still waits."""

Send = Callable[[], object] | None
"""Sends the request that a thread then waits for; None if it was sent before."""


class SocketReader:
    """The right to read one socket. Made on the loop's thread, which holds it until `open` is called.

    Args:
        read: reads and delivers once; the waiting thread calls it. It returns False when nothing more can arrive.
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
        self._end_lock = allocate_lock()  # protects `_then`, `_has_left` and the closing of the bell
        self._shield = SignalShield()
        self._descriptor = -1
        self._bell = -1
        self._along: dict[int, SocketReader] = {}  # the others that are read, by the descriptors of socket and bell

    def allow(self, descriptor: int, watch: Callable[[int], Watch]) -> bool:
        """Prepares for reading threads; False if the system has no free descriptor.

        Args:
            watch: registers the socket with the loop, which reads it unless a thread does.
        """
        try:
            self._disarm, self._arm = watch(descriptor)
        except OSError:
            return False
        self._descriptor = descriptor
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._brief = BriefPolling(self._poller.poll, may_poll())
        return True

    # ------------------------------------------------------------ a thread that waits

    def read_while_waiting(
        self, is_waiting: Waits, timeout_s: float | None, sleep: Sleep | None = None, send_first: Send = None
    ) -> bool:
        """Reads until this thread's wait has ended, unless another thread reads.

        Args:
            is_waiting: whether the caller still waits; called after each read and after each ring.
            timeout_s: the limit, in seconds; None for no limit.
            sleep: called around each sleep.
            send_first: sends the request that this thread waits for. It is always called once; if this thread reads,
                the socket is disarmed before, so that the reply wakes no other thread.

        Returns:
            True if the wait has ended. If False, another thread reads, the limit has passed, or the connection is about
            to end; the caller then waits in another way, for the rest of its time.

        Raises:
            BlockingInLoop: this thread already reads, and waits again in a finalizer.
            BaseException: `send_first` raised it.
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
                if send_first is not None:
                    send_first()
                return False
            self._holder = me
            if self._bell < 0 and not self._take_bell():
                self.give_back()
                if send_first is not None:
                    send_first()
                return False
            try:
                if self._disarm() < 0:
                    raise watch_failure()
                try:
                    if send_first is not None:
                        send_first()
                    return self._read_until(is_waiting, timeout_s, sleep, shield)
                finally:
                    while self._along:
                        self._leave_behind(next(iter(self._along.values())))
                    if self._arm() < 0 and not self._is_stopped:  # the loop would not watch the socket any more
                        raise watch_failure()
            finally:
                self.give_back()
        finally:
            if shield is not None:
                shield.leave()

    def _take_bell(self) -> bool:
        """Creates the bell when a thread first reads: in a large world, threads read few connections."""
        try:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            return False
        self._poller.register(bell, select.POLLIN)
        self._bell = bell
        return True

    def read_along(self, other: SocketReader) -> None:
        """Makes this thread, if it reads, also read another socket that no thread reads, until its wait ends."""
        me = get_ident()
        if self._holder != me or other._is_stopped or not other._lock.acquire(False):
            return
        other._holder = me
        if (other._bell < 0 and not other._take_bell()) or other._disarm() < 0:
            other.give_back()
            return
        for descriptor in (other._descriptor, other._bell):
            self._along[descriptor] = other
            self._poller.register(descriptor, select.POLLIN)

    def _leave_behind(self, other: SocketReader) -> None:
        for descriptor in (other._descriptor, other._bell):
            self._poller.unregister(descriptor)
            del self._along[descriptor]
        try:
            if other._arm() < 0 and not other._is_stopped:
                raise watch_failure()
        finally:
            other.give_back()

    def _acquire_from_loop(self) -> bool:
        """Waits briefly for the loop, which may just have read the message that this thread waited for before."""
        return self._is_open and self._holder == self._loop_thread and self._lock.acquire(timeout=READ_TURN_S)

    def _read_until(
        self, is_waiting: Waits, timeout_s: float | None, sleep: Sleep | None, shield: SignalShield | None
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
                if (other := self._along.get(descriptor)) is not None:
                    if descriptor == other._bell:
                        os.eventfd_read(descriptor)
                    elif not other._read():
                        self._leave_behind(other)
                        break  # no more is read of its sockets
                    if other._is_stopped:
                        self._leave_behind(other)
                        break
                elif descriptor == self._bell:
                    os.eventfd_read(self._bell)
                elif not self._read():
                    return False
        return not self._is_stopped

    def interrupt(self) -> None:
        """Makes the reading thread check whether it still waits; any thread."""
        if self._holder not in (0, get_ident()):
            with self._end_lock:
                if self._bell >= 0:
                    os.eventfd_write(self._bell, 1)

    # ------------------------------------------------------------ I/O loop

    def open(self) -> None:
        """Lets threads read from now on."""
        self._is_open = True
        self.give_back()

    def take(self) -> bool:
        """Takes the lock for the loop, which releases it with `give_back`; False if a thread reads."""
        if not self._lock.acquire(False):
            return False
        self._holder = get_ident()
        return True

    def give_back(self) -> None:
        """Releases the lock; after `stop`, the caller keeps it forever."""
        self._holder = 0
        if self._is_stopped:
            self._leave()
            return
        self._lock.release()
        # `stop` may have been called in between, and may have stopped waiting for the lock.
        if self._is_stopped and self._lock.acquire(False):
            self._leave()

    def stop(self) -> bool:
        """Ends reading by threads for good; idempotent.

        Returns:
            Whether the loop may read and close the socket; False if the reading thread did not stop in time.
        """
        if not self._is_stopped:
            self._is_stopped = True
            if self._holder == get_ident():  # the loop is reading, and a frame has ended the channel
                self._leave()
            else:
                self.interrupt()
                if self._lock.acquire(timeout=LEAVE_LIMIT_S):
                    self._leave()
        return self._has_left

    def close(self, then: Callable[[], object]) -> None:
        """After `stop`: calls `then` once no thread reads, either now or on the thread that stops late."""
        with self._end_lock:
            self._then = then
            has_left = self._has_left
        if has_left:
            self._end()

    def _leave(self) -> None:
        """Called after `stop` by the holder of the lock, which keeps it."""
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
        then()
