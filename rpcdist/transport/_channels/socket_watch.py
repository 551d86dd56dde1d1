"""What the I/O loop watches instead of a socket, so that any thread can hide the socket from it.

[Note: keeping the lock] `select.epoll.modify` lets go of the interpreter's lock around its system call, which takes a
microsecond. Where many threads call, another one takes the lock in between, and the leader that has just shown its
socket stands in line before it can give its right back. All that time the loop is woken, finds the right taken, and is
woken again: with 8 calling threads that were four wake-ups a call, and a fifth of the rate. `ctypes.PyDLL` keeps the
lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import platform
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final

CAN_WATCH: Final = hasattr(select, "epoll")

_MODIFY: Final = 3  # EPOLL_CTL_MOD
_MOST_AT_ONCE: Final = 64  # sockets that are read in one turn of the loop
_EVENT_BYTES: Final = 16  # of a `struct epoll_event`, or 12 where it is packed
_DATA_AT: Final = 4 if platform.machine() in ("x86_64", "i686", "i386") else 8  # where the descriptor stands in it


def _epoll_ctl() -> Any:
    if not CAN_WATCH:
        return None
    function = ctypes.PyDLL(None, use_errno=True).epoll_ctl
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
    return function


_control: Final = _epoll_ctl()
_READABLE: Final = int(getattr(select, "EPOLLIN", 1))


def _event(mask: int, descriptor: int) -> bytes:
    """As `select.epoll.modify` makes it; `poll` tells by its data which socket it is."""
    event = bytearray(_EVENT_BYTES)
    event[:4] = mask.to_bytes(4, sys.byteorder)
    event[_DATA_AT : _DATA_AT + 4] = descriptor.to_bytes(4, sys.byteorder)
    return bytes(event)


class SocketWatch:
    """One socket in an epoll instance. `hide` and `show` may be called on any thread, but not after `close`.

    Attributes:
        hide: from now on the socket wakes nobody who watches; a negative number if that failed.
        show: the socket wakes who watches, at once if there is something to be read; likewise.

    Args:
        epoll: the instance, in which the socket is shown at first.
        descriptor: of the socket.

    Raises:
        OSError: the system has no memory left for it.
    """

    __slots__ = ("_descriptor", "_epoll", "hide", "show")

    def __init__(self, epoll: select.epoll, descriptor: int) -> None:
        self._epoll, self._descriptor = epoll, descriptor
        epoll.register(descriptor, select.EPOLLIN)
        # Not methods: a call hides and shows the socket once, and each function on the way counts.
        number = epoll.fileno()
        self.hide: Callable[[], int] = partial(_control, number, _MODIFY, descriptor, _event(0, descriptor))
        self.show: Callable[[], int] = partial(_control, number, _MODIFY, descriptor, _event(_READABLE, descriptor))

    def failure(self) -> OSError:
        """Why `hide` or `show` has just returned a negative number on this thread."""
        return OSError(ctypes.get_errno(), "a connection cannot be hidden from the I/O loop, or shown to it")

    def close(self) -> None:
        """Ends the watching; the socket stays open."""
        with suppress(OSError, ValueError):  # it was closed, or the whole instance
            self._epoll.unregister(self._descriptor)


class WatchedSockets:
    """The sockets of one event loop that threads may hide from it, in one epoll instance, which the loop watches.

    One instance for each socket would tell the loop without a system call which socket it is, and cost a descriptor for
    each connection: at rank 0, one for each worker of the world. On the loop's thread.

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
        """Those of a loop; raises `OSError` where there is no descriptor left for the first."""
        found = _of_loops.get(loop)
        if found is None:
            found = _of_loops[loop] = cls(loop)
        return found

    def __repr__(self) -> str:
        return f"<WatchedSockets [{len(self._on_ready)}]>"

    def add(self, descriptor: int, on_ready: Callable[[], object]) -> SocketWatch:
        """Has a function called whenever a socket that is shown has something to be read."""
        watch = SocketWatch(self.epoll, descriptor)
        self._on_ready[descriptor] = copy_context(), on_ready
        return watch

    def remove(self, descriptor: int) -> None:
        """Ends that; after the last one nothing is left of this."""
        if self._on_ready.pop(descriptor, None) is None:
            return
        with suppress(OSError):  # the socket was closed
            self.epoll.unregister(descriptor)
        if not self._on_ready:
            del _of_loops[self._loop]
            self._loop.remove_reader(self.epoll.fileno())
            self.epoll.close()

    def _read(self) -> None:
        for descriptor, _ in self.epoll.poll(0, _MOST_AT_ONCE):
            if (found := self._on_ready.get(descriptor)) is not None:
                found[0].run(found[1])
            if self.epoll.closed:
                return


_of_loops: Final[dict[asyncio.AbstractEventLoop, WatchedSockets]] = {}
"""Of the loops that have such sockets now."""
