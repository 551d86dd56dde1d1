"""Which thread makes progress for a group: one at a time leads and moves the bytes, the others sleep.

1. While a request is pending, some thread leads or has been called to: a thread that blocks in `send` or `recv`, else
   the group's own thread, which is started when it is first needed.
2. A leader stops when its own request is done, and passes the lead to a thread that waits, else to the group's thread.
3. `changed`, called with the lock held, announces every change that concerns the leader; it ends the leader's sleep.
4. The callback of a settled request may wait for another request on the leader's thread, which then goes on leading
   until that request is settled, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.collectives._transports.pollers import Waker
from rpcdist.collectives.work import Work
from rpcdist.time_limits import PROGRESS_STOP_LIMIT_S

__all__ = ["Leadership", "PendingWork"]


class Leadership:
    """Passes the lead between the threads of one group.

    Args:
        lock: guards all attributes.
        lead: moves bytes until the given request is settled; with None, as long as any request is pending.
        is_needed: whether a request is pending; called with the lock held.
        retired: called with the lock held when the last leader has stopped after `stop`.
        name: the name of the group's thread.

    Attributes:
        version: grows with every change that concerns the leader.
        waker: wakes a sleeping leader.
        sleeping: the leader sleeps, or is about to; set by it with the lock held.
        stopped: no thread may lead any more.
    """

    def __init__(
        self,
        lock: threading.Lock,
        lead: Callable[[Request | None], None],
        is_needed: Callable[[], bool],
        retired: Callable[[], None],
        name: str,
    ) -> None:
        self._lock = lock
        self._lead = lead
        self._is_needed = is_needed
        self._retired = retired
        self._name = name
        self._leading = False
        self._leader = 0  # the thread that runs `lead`
        self._followers: deque[Request] = deque()
        self._thread: threading.Thread | None = None
        self._called = threading.Event()
        self.version = 0
        self.waker = Waker()
        self.sleeping = False
        self.stopped = False

    # ------------------------------------------------------------ with the lock held

    def changed(self) -> None:
        """Announces a change to the leader."""
        self.version += 1
        if self.sleeping:
            self.sleeping = False
            self.waker.wake()

    @property
    def has_followers(self) -> bool:
        """Whether a blocked thread could take the lead; without the lock, the answer may be outdated."""
        return bool(self._followers)

    def ensure(self) -> None:
        """Makes sure that some thread leads, for requests that no thread waits for."""
        self.changed()
        if not self._leading and not self.stopped:
            self._call_thread()

    def take(self) -> bool:
        """Takes the lead if no thread has it, and returns whether it did; then call `pass_on`."""
        if self._leading:
            return False
        self._leading = True
        return True

    def stop(self) -> None:
        """Lets no thread lead any more; a present leader stops at its next turn."""
        self.stopped = True
        self.changed()
        self._called.set()
        if not self._leading:
            self._retired()

    def pass_on_locked(self) -> None:
        """Gives the lead to the next thread that needs it."""
        self._leading = False
        while self._followers:
            follower = self._followers.popleft()
            if not follower.settled and follower.waiter is not None:
                self._leading = follower.leads = True
                follower.waiter.set()
                return
        if self.stopped:
            self._retired()
        elif self._is_needed():
            self._call_thread()

    def _call_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._called.set()

    # ------------------------------------------------------------ without the lock

    def pass_on(self) -> None:
        """`pass_on_locked`, for a caller that does not hold the lock."""
        with self._lock:
            self.pass_on_locked()

    def wait(self, request: Request) -> None:
        """Blocks until the request is settled: leads, or sleeps while another thread leads and observes the deadline.

        After an exception from a signal handler (KeyboardInterrupt) the other threads go on with the request.
        """
        if self._leader == threading.get_ident():
            self._lead(request)
            return
        with self._lock:
            leads = self.take()
            if not leads:
                request.waiter = threading.Event()
                self._followers.append(request)
        try:
            if not leads and not request.settled:
                assert request.waiter is not None
                request.waiter.wait()
        except BaseException:
            with self._lock:
                if request in self._followers:
                    self._followers.remove(request)
            if request.leads:
                self.pass_on()
            raise
        if leads or request.leads:
            self._lead_and_pass_on(request)
        else:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        with self._lock:
            if request.leads:  # it was settled and given the lead at the same time
                self.pass_on_locked()
            elif request in self._followers:
                self._followers.remove(request)

    def _run(self) -> None:
        while not self.stopped:
            self._called.wait()
            self._called.clear()
            with self._lock:
                leads = not self.stopped and self._is_needed() and self.take()
            if leads:
                self._lead_and_pass_on(None)

    def _lead_and_pass_on(self, request: Request | None) -> None:
        self._leader = threading.get_ident()
        try:
            self._lead(request)
        finally:
            self._leader = 0
            self.pass_on()

    def join(self) -> None:
        """Waits, bounded, until the group's thread has ended; does nothing on that thread. Call it after `stop`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PROGRESS_STOP_LIMIT_S)


class PendingWork(Work):
    """The `Work` of a request. The first thread that waits for it without a limit of its own may lead."""

    def __init__(self, request: Request, leadership: Leadership, result: list[torch.Tensor] | None = None) -> None:
        super().__init__(request.title, result)
        self._request = request
        self._leadership = leadership
        self._has_waiter = False

    def _block(self, timeout_s: float | None) -> None:
        with self._lock:
            first = not self._has_waiter and timeout_s is None
            self._has_waiter |= first
        if first:
            self._leadership.wait(self._request)
        else:
            super()._block(timeout_s)
