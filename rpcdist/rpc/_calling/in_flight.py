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
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

from rpcdist.deadline import Deadline, acquire

COUNTED_FROM_BYTES: Final = 4096
"""Calls with fewer bytes of arguments do not count, and have no cost here."""


_Waiter = tuple[int, Callable[[], object]]
"""The bytes of a call that waits, and the function to call when it is admitted."""


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
        self._num_bytes: Counter[int] = Counter()  # of the admitted calls, by worker
        self._waiters: dict[int, OrderedDict[int, _Waiter]] = {}  # by worker and call, in the order of arrival
        self._lock = threading.Lock()

    def usage(self) -> dict[int, tuple[int, int]]:
        waiters = self._waiters.copy()  # in a single step: inspection takes no lock of the call path
        return {worker: (size, len(waiters.get(worker, ()))) for worker, size in dict(self._num_bytes).items()}

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
            if to in self._waiters or not self._has_room(to, num_bytes):
                self._waiters.setdefault(to, OrderedDict())[call] = num_bytes, admitted
                return False
            self._admit(to, call, num_bytes)
            return True

    def take_anyway(self, to: int, call: int, num_bytes: int) -> None:
        with self._lock:
            self._admit(to, call, num_bytes)

    def end(self, to: int, call: int) -> None:
        """Records that a call to a worker has ended, admitted or not; idempotent."""
        with self._lock:
            waiters = self._waiters.get(to, OrderedDict())
            self._num_bytes[to] -= self.admitted.pop(call, 0)
            waiters.pop(call, None)
            admitted = []
            while waiters:
                first, (num_bytes, wake) = next(iter(waiters.items()))
                if not self._has_room(to, num_bytes):
                    break
                del waiters[first]
                self._admit(to, first, num_bytes)
                admitted.append(wake)
            if not waiters:
                self._waiters.pop(to, None)
            if not self._num_bytes[to]:
                del self._num_bytes[to]
        for wake in admitted:
            wake()

    def _has_room(self, to: int, num_bytes: int) -> bool:
        there = self._num_bytes[to]
        return not there or there + num_bytes <= self.limit_bytes

    def _admit(self, to: int, call: int, num_bytes: int) -> None:
        self._num_bytes[to] += num_bytes
        self.admitted[call] = num_bytes
