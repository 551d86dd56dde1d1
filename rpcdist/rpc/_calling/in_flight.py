"""Bounds the memory of calls in flight: a caller that is faster than the callee must wait.

The bytes of the arguments of calls to one worker count from the moment when a call may be sent until it ends. So the
bound covers bytes that wait here to be written, bytes in transit, and bytes that wait for a pool thread at the callee.
Calls of a few bytes do not count: their number is bounded by the memory of their futures at the caller.

If there is no room:

    a thread of the user      sleeps until there is room, at most until the deadline of its call
    a task on an event loop   does not wait, since that would block the loop: its message is sent when there is room
    a handler                 does not wait: two workers that call each other from handlers would wait for each other

Replies never wait. Calls are sent in the order in which they were made; a call that is larger than the limit is sent
alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rpcdist.deadline import Deadline, acquire

COUNTED_FROM_BYTES: Final = 4096
"""Calls with fewer bytes of arguments do not count, and have no cost here."""


_Waiter = tuple[int, Callable[[], object]]
"""The bytes of a call that waits, and the function to call when it is admitted."""


@dataclass(slots=True, eq=False)
class _Line:
    """The calls to one worker."""

    num_bytes: int = 0
    waiters: OrderedDict[int, _Waiter] = field(default_factory=OrderedDict)  # by call, in the order of arrival


class InFlightBytes:
    """Limits the bytes of the calls in flight to each worker; thread-safe.

    Invariants:
        1. The admitted calls to one worker have at most `limit_bytes` together, or there is only one, except for calls
           admitted by `take_anyway`.
        2. Waiting calls are admitted in the order in which they were made.

    Attributes:
        admitted: the bytes of each call that was admitted and has not ended.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.admitted: dict[int, int] = {}
        self._lines: dict[int, _Line] = {}  # by worker
        self._lock = threading.Lock()

    def usage(self) -> dict[int, tuple[int, int]]:
        lines = self._lines.copy()  # in a single step: inspection takes no lock of the call path
        return {worker: (line.num_bytes, len(line.waiters)) for worker, line in lines.items()}

    def wait(self, to: int, call: int, num_bytes: int, deadline: Deadline) -> bool:
        """Waits until a call to a worker is admitted; False if its deadline passes first."""
        there_is_room = threading.Lock()
        there_is_room.acquire()
        if self.defer(to, call, num_bytes, there_is_room.release):
            return True
        admitted = False
        try:
            admitted = acquire(there_is_room, deadline.wait_s())
        finally:
            if not admitted:  # too late, or Ctrl-C in the main thread
                self.end(to, call)
        return admitted

    def defer(self, to: int, call: int, num_bytes: int, admitted: Callable[[], object]) -> bool:
        """Admits a call at once, or returns False and calls `admitted`, which must not block, later.

        `admitted` is called on the thread that ends another call, unless `end` comes first.
        """
        with self._lock:
            line = self._lines.setdefault(to, _Line())
            if line.waiters or not self._has_room(line, num_bytes):
                line.waiters[call] = num_bytes, admitted
                return False
            self._admit(line, call, num_bytes)
            return True

    def take_anyway(self, to: int, call: int, num_bytes: int) -> None:
        with self._lock:
            self._admit(self._lines.setdefault(to, _Line()), call, num_bytes)

    def end(self, to: int, call: int) -> None:
        """Records that a call to a worker has ended, admitted or not; idempotent."""
        with self._lock:
            line = self._lines.get(to)
            if line is None:
                return
            found = self.admitted.pop(call, None)
            if found is not None:
                line.num_bytes -= found
            else:
                line.waiters.pop(call, None)
            admitted = []
            while line.waiters:
                first, (num_bytes, wake) = next(iter(line.waiters.items()))
                if not self._has_room(line, num_bytes):
                    break
                del line.waiters[first]
                self._admit(line, first, num_bytes)
                admitted.append(wake)
            if not line.num_bytes and not line.waiters:
                del self._lines[to]
        for wake in admitted:
            wake()

    def _has_room(self, line: _Line, num_bytes: int) -> bool:
        return not line.num_bytes or line.num_bytes + num_bytes <= self.limit_bytes

    def _admit(self, line: _Line, call: int, num_bytes: int) -> None:
        line.num_bytes += num_bytes
        self.admitted[call] = num_bytes
