"""Lets any thread hide a socket from the I/O loop: the loop watches an epoll instance instead of the sockets.

[Note: keeping the lock] `select.epoll.modify` releases the interpreter's lock around its system call, which takes a
microsecond. If many threads make calls, another thread takes the lock in between, and the leader that has just shown
its socket must queue for it before it can release the socket's lock. Meanwhile the loop wakes up again and again and
finds the socket's lock taken: with 8 calling threads, four times per call. `ctypes.PyDLL` keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import platform
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final

from rpcdist.time_limits import READ_TURN_S

CAN_WATCH: Final = hasattr(select, "epoll")

_MODIFY: Final = 3  # EPOLL_CTL_MOD
_MOST_AT_ONCE: Final = 8
"""Sockets read before the loop may do other work. The kernel then puts them behind the others, so all have turns."""
_EVENT_BYTES: Final = 16  # size of a `struct epoll_event`, or 12 where it is packed
_DATA_AT: Final = 4 if platform.machine() in ("x86_64", "i686", "i386") else 8  # offset of the descriptor in it


def _epoll_ctl() -> Any:
    if not CAN_WATCH:
        return None
    function = ctypes.PyDLL(None, use_errno=True).epoll_ctl
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
    return function


_control: Final = _epoll_ctl()
_READABLE: Final = int(getattr(select, "EPOLLIN", 1))


def _event(mask: int, descriptor: int) -> bytes:
    """The event that `select.epoll.modify` would make; its data tells `poll` which socket it is."""
    event = bytearray(_EVENT_BYTES)
    event[:4] = mask.to_bytes(4, sys.byteorder)
    event[_DATA_AT : _DATA_AT + 4] = descriptor.to_bytes(4, sys.byteorder)
    return bytes(event)


class SocketWatch:
    """One socket in an epoll instance. `hide` and `show` may be called on any thread, but not after `close`.

    Attributes:
        hide: stops events of this socket; returns a negative number if that failed.
        show: lets events through again, at once if there are unread bytes; returns a negative number if that failed.

    Args:
        epoll: the instance; the socket is shown at first.
        descriptor: the socket's.

    Raises:
        OSError: the system has no memory left for the registration.
    """

    __slots__ = ("_descriptor", "_epoll", "hide", "show")

    def __init__(self, epoll: select.epoll, descriptor: int) -> None:
        self._epoll, self._descriptor = epoll, descriptor
        epoll.register(descriptor, select.EPOLLIN)
        # Attributes instead of methods: every call hides and shows its socket, so each Python frame counts.
        number = epoll.fileno()
        self.hide: Callable[[], int] = partial(_control, number, _MODIFY, descriptor, _event(0, descriptor))
        self.show: Callable[[], int] = partial(_control, number, _MODIFY, descriptor, _event(_READABLE, descriptor))

    def failure(self) -> OSError:
        """The error of `hide` or `show`, right after one of them returned a negative number on this thread."""
        return OSError(ctypes.get_errno(), "the event mask of a connection cannot be changed (epoll_ctl)")

    def close(self) -> None:
        """Ends the watching; the socket stays open."""
        with suppress(OSError, ValueError):  # the socket or the instance was closed
            self._epoll.unregister(self._descriptor)


class WatchedSockets:
    """The sockets of one event loop that threads may hide from it. The loop watches their common epoll instance.

    One instance per socket would save a system call, but cost a descriptor per connection: at rank 0, one for each
    worker of the world. Used on the loop's thread.

    Attributes:
        epoll: the instance.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.epoll = select.epoll()
        self._loop = loop
        self._on_ready: dict[int, tuple[Context, Callable[[], object]]] = {}
        loop.add_reader(self.epoll.fileno(), self._read)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> WatchedSockets:
        """The sockets of a loop; raises `OSError` if no descriptor is left for the epoll instance."""
        found = _of_loops.get(loop)
        if found is None:
            found = _of_loops[loop] = cls(loop)
        return found

    def add(self, descriptor: int, on_ready: Callable[[], object]) -> SocketWatch:
        """Calls a function whenever a socket that is shown has unread bytes."""
        watch = SocketWatch(self.epoll, descriptor)
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
