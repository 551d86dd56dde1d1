"""The thread that handles the events of one backward pass, and where it waits for them.

That is the thread that waits for the pass on the worker where it began, and a pool thread on the others. A *turn* is
all that it does until nothing is left to do. Then it sends what the others must hear of it, and reads the connection on
which the next message will probably come, if nobody else does: so a message is handled by the thread that has read it,
and wakes no other. It claims the connection before it sends: the answer may be there before the thread that sends is
back from its system call, and would wake the I/O loop.
"""

from __future__ import annotations

import threading
from _thread import RLock
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from rpcdist.autograd._spans import PassClock
from rpcdist.deadline import Deadline
from rpcdist.rpc._executors.blocking import LastAct, blocking, hooks
from rpcdist.rpc._peers.network import MessageSink

__all__ = ["Job", "PassTurns"]

Job = Callable[[], object]
T = TypeVar("T")


class PassTurns(ABC):
    """See the module. Any thread may call `post`, `follow` and `wake`, also the I/O loop; none of them waits.

    A base class of the pass, and not a part of it: the two would refer to each other, and keep the graph alive.

    Args:
        submit: calls a function on a thread of the pool.
        clock: is told when there is nothing to do.

    Attributes:
        is_over: whether nothing is to be done any more.
    """

    def __init__(self, submit: Callable[[Job], object], clock: PassClock) -> None:
        self.is_over = False
        self._submit = submit
        self._clock = clock
        self._lock = RLock()  # entered more often than the condition, and in less time
        self._changed: threading.Condition | None = None  # made for the first sleep on it: most passes read instead
        self._inbox: deque[Job] = deque()
        self._is_draining = False
        self._has_waiter = False
        self._source: MessageSink | None = None  # where the next message will probably come
        self._led: MessageSink | None = None  # read by the thread that waits

    @abstractmethod
    def next_step(self) -> Job | None:
        """What to do when all events are handled; None if nothing is left."""

    @abstractmethod
    def pack(self) -> Job | None:
        """What sends all that the others must hear, encoded already: for a thread that may run no code of users.

        None if they need not hear anything. What goes wrong with the job ends the pass.
        """

    @abstractmethod
    def guarded(self, job: Callable[[], T]) -> T | None:
        """What a job returns; it is not called once the pass is over, and the pass fails if the job does."""

    @abstractmethod
    def expire_here(self) -> None:
        """Ends the pass because its deadline is over."""

    @property
    def has_source(self) -> bool:
        """Whether it is known where the next message will probably come."""
        return self._source is not None

    def follow(self, session: MessageSink | None) -> None:
        """The next message will probably come there."""
        self._source = session

    def post(self, job: Job, lazily: bool = False) -> None:
        """Calls `job` on the thread that handles the events; `lazily`: not before the next event."""
        with self._lock:
            self._inbox.append(job)
            if lazily:
                return
            if not self._has_waiter:
                if self._is_draining:
                    return
                self._is_draining = True
        if self._has_waiter:
            self.wake()
        else:
            self._submit(self._drain)

    def wake(self) -> None:
        """Has the thread that waits look around."""
        with self._lock:
            if self._changed is not None:
                self._changed.notify_all()
        led = self._led
        if led is not None:
            led.ring()

    def run_turns(self, first: Job, deadline: Deadline) -> None:
        """Calls `first`, then handles events on this thread until the pass is over. Nobody else knows the pass yet."""
        self._has_waiter = True
        self.guarded(first)
        while not self.is_over:
            job = self._next_job()
            if job is not None:
                self.guarded(job)
            elif not self._wait(deadline):
                self.expire_here()

    def _drain(self) -> None:
        """A turn on a thread of the pool."""
        while True:
            job = self._next_job()
            if job is not None:
                self.guarded(job)
                continue
            send = self.guarded(self.pack)
            with self._lock:
                if not self._inbox:
                    self._clock.idle()
                    self._is_draining = False
                    break
            if send is not None:
                send()
        if hooks.enter is not None and self._source is not None:
            hooks.last_act = LastAct([] if send is None else [send], self._source)
        elif send is not None:
            send()

    def _next_job(self) -> Job | None:
        return self._inbox.popleft() if self._inbox else self.next_step()  # no other thread takes any out

    def _wait(self, deadline: Deadline) -> bool:
        """Sends, then waits for an event or for the end of the pass; False when the time is over."""
        send = self.guarded(self.pack)
        self._clock.idle()
        if hooks.enter is None:  # a thread of the user's
            return self._sleep(send, deadline)
        with blocking():
            return self._sleep(send, deadline)

    def _sleep(self, send: Job | None, deadline: Deadline) -> bool:
        source = self._led = self._source  # set before `_is_waiting` looks: whoever posts later then rings
        if source is None and send is not None:
            send()
            send, source = None, self._source
            self._led = source
        try:
            if source is not None and source.lead(self._is_waiting, deadline.wait_s(), None, send):
                return True
        finally:
            self._led = None
        with self._lock:
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            return self._changed.wait_for(self._has_news, deadline.wait_s())

    def _is_waiting(self) -> bool:
        return not self._inbox and not self.is_over

    def _has_news(self) -> bool:
        return not self._is_waiting()
