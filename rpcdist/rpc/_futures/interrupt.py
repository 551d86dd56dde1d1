"""Ctrl-C while the main thread waits inside torch's C++ (`torch.futures.wait_all`).

In C++ signals are not noticed. The interpreter writes the number of every signal to a descriptor; the I/O loop
reads it, and ends the calls in flight, which ends the wait; then the main thread raises `KeyboardInterrupt` as usual.

A main thread that is anywhere else notices the signal by itself, perhaps before the I/O loop reads of it. Then nothing
may be ended here: it may have begun to clean up, with calls of its own.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable

from rpcdist.transport.io_loop import IoLoop

logger = logging.getLogger(__name__)


class InterruptWatch:
    """Calls `interrupted` on the I/O loop at Ctrl-C, where this can be known and the program has no handler of its own.

    It steps back (and `wait_all` then waits until its futures end) when it is made outside the main thread, or when the
    descriptor belongs to somebody else, such as an asyncio loop of the main thread.
    """

    def __init__(self, io: IoLoop, interrupted: Callable[[], None]) -> None:
        self._io = io
        self._interrupted = interrupted
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            ours.close()
            theirs.close()
            return
        self._sockets = (ours, theirs)
        self._io.call_soon(self._io.loop.add_reader, ours.fileno(), self._read)

    def _read(self) -> None:
        sockets = self._sockets
        if sockets is None:  # the main thread has called `stop`, and `close` comes next
            return
        try:
            numbers = sockets[0].recv(4096)
        except BlockingIOError:
            return
        if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        if _main_thread_is_in_torch():
            self._interrupted()

    def stop(self) -> None:
        """Gives the descriptor back; main thread only, like `start`. Elsewhere it stays until the process ends."""
        if self._sockets is None or threading.current_thread() is not threading.main_thread():
            return
        ours, theirs = self._sockets
        self._sockets = None
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, theirs.fileno()):
            signal.set_wakeup_fd(current)  # somebody else's by now

        def close() -> None:
            self._io.loop.remove_reader(ours.fileno())
            ours.close()
            theirs.close()

        self._io.call_soon(close)


def _main_thread_is_in_torch() -> bool:
    """Whether the function that the main thread runs is one of torch's, as those that wait in C++ are."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
