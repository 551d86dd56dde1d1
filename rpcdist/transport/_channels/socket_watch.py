"""What the I/O loop watches instead of a socket, so that any thread can hide the socket from it.

[Note: keeping the lock] `select.epoll.modify` lets go of the interpreter's lock around its system call, which takes a
microsecond. Where many threads call, another one takes the lock in between, and the leader that has just shown its
socket stands in line before it can give its right back. All that time the loop is woken, finds the right taken, and is
woken again: with 8 calling threads that were four wake-ups a call, and a fifth of the rate. `ctypes.PyDLL` keeps the
lock.
"""

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

__all__ = ["CAN_WATCH", "SocketWatch"]

CAN_WATCH: Final = hasattr(select, "epoll")

_MODIFY: Final = 3  # EPOLL_CTL_MOD
_EVENT_BYTES: Final = 16  # of a `struct epoll_event`, or 12 where it is packed; its second part is never looked at


def _epoll_ctl() -> Any:
    if not CAN_WATCH:
        return None
    function = ctypes.PyDLL(None, use_errno=True).epoll_ctl
    function.restype, function.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
    return function


_control: Final = _epoll_ctl()
_HIDDEN: Final = bytes(_EVENT_BYTES)
_SHOWN: Final = int(getattr(select, "EPOLLIN", 1)).to_bytes(4, sys.byteorder) + bytes(_EVENT_BYTES - 4)


class SocketWatch:
    """An epoll instance with one socket in it. `hide` and `show` may be called on any thread, but not after `close`.

    Attributes:
        hide: from now on the socket wakes nobody who watches; a negative number if that failed.
        show: the socket wakes who watches, at once if there is something to be read; likewise.

    Args:
        descriptor: of the socket, which is shown at first.

    Raises:
        OSError: there is no descriptor left.
    """

    __slots__ = ("_epoll", "_number", "hide", "show")

    def __init__(self, descriptor: int) -> None:
        self._epoll = select.epoll()
        self._number = self._epoll.fileno()
        try:
            self._epoll.register(descriptor, select.EPOLLIN)
        except BaseException:
            self._epoll.close()
            raise
        # Not methods: a call hides and shows the socket once, and each function on the way counts.
        self.hide: Callable[[], int] = partial(_control, self._number, _MODIFY, descriptor, _HIDDEN)
        self.show: Callable[[], int] = partial(_control, self._number, _MODIFY, descriptor, _SHOWN)

    def fileno(self) -> int:
        """Readable when the socket is, unless it is hidden."""
        return self._number

    def failure(self) -> OSError:
        """Why `hide` or `show` has just returned a negative number on this thread."""
        return OSError(ctypes.get_errno(), "a connection cannot be hidden from the I/O loop, or shown to it")

    def close(self) -> None:
        """Ends the watching; the socket stays open."""
        self._epoll.close()
