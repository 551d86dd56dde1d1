"""The progress engine: moves the bytes of one rank's messages between its sockets and its `MessageState`.

1. One thread at a time drives: it alone reads the sockets and sleeps in poll. It holds the lock except while it sleeps;
   no system call under the lock blocks.
2. While a request is pending, some thread drives or will do so within `BATCH_DELAY_S`: a thread that blocks in
   `send`, `recv` or `wait`, otherwise the group's background thread, which is started when it is first needed.
3. A driver stops when its own request is done, and to run callbacks, which may wait for another request and so drive
   again. Then a waiting thread takes over, or the background thread if no thread waits.
4. Code that changes the state of the driver or of followers calls `changed`.
5. A driver releases the lock after each turn, in which it reads and writes every socket once (`entrance`).
6. A signal handler may raise wherever a thread of the program waits. So only `with` takes locks: a thread that was
   interrupted while it took one does not hold it, and must not release it.
"""

from __future__ import annotations

import os
import select
import threading
import time

from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.collectives._transports.transport_base import Pollers, SpinPolicy, Waker
from rpcdist.errors import GroupAborted, described_error
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import BATCH_DELAY_S, CLOSE_LIMIT_S, IDLE_RECHECK_S, LONGEST_WAIT_S


class ProgressEngine:
    """Lets the threads of one rank move its messages, one at a time; see [Note: progress] in `messenger`.

    Args:
        spin_policy: how long a blocked thread tries its sockets before it sleeps.

    Attributes:
        lock: guards the state and the attributes of this object.
        entrance: a lock that every thread takes before `lock`, except one that drives or may drive next. The driver
            takes it after each turn, so that other threads come one after the other and none waits for more than a
            turn.
        sleeping: whether the driver sleeps or is about to.
        thread: the group's background thread; None until it is needed.
        stopped: whether `stop` has begun: no thread drives any more.
    """

    def __init__(self, state: MessageState, spin_policy: SpinPolicy, group_name: str) -> None:
        self.lock = threading.Lock()
        self.entrance = threading.Lock()
        self.sleeping = False
        self.thread: threading.Thread | None = None
        self.stopped = False
        self._state = state
        self._spin_policy = spin_policy
        self._group_name = group_name
        self._pollers = Pollers()
        self._waker = Waker()
        self._driver: object | None = None  # an object that identifies the driving thread; None while no thread drives
        self._num_turns = 0  # by threads that wait for a request
        self._num_turns_seen = -1  # their number when the background thread last looked
        self._followers: list[threading.Lock] = []  # each is released when no thread drives or a request is done
        self._called = threading.Condition(self.lock)  # the background thread waits here
        self._watching = False  # the background thread need not be notified: it looks by itself soon

    # ------------------------------------------------------------ with the lock held

    def _wake(self) -> None:
        if self.sleeping:
            self.sleeping = False
            self._waker.wake()

    def changed(self, settles: bool = False) -> None:
        """Announces a change to the driver and its followers; makes sure that some thread drives.

        Args:
            settles: whether that thread must also call `settle`, because the caller does not.
        """
        if self.sleeping:
            self._wake()
        if self._followers:
            for follower in self._followers:
                if follower.locked():  # otherwise an interrupted call has released it
                    follower.release()
            self._followers.clear()
        elif not (self._driver or self._watching or self.stopped) and (settles or self._state.has_work):
            if self.thread is None:
                thread = threading.Thread(target=self._run, name=f"rpcdist p2p {self._group_name}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:  # threads that wait still move the messages
                    own_shortage(exc)
                    return
                self.thread = thread
            self._watching = True
            self._called.notify()

    def _follow(self) -> threading.Lock:
        """Makes the caller a follower; returns a lock that is released when the caller should look again."""
        follower = threading.Lock()
        follower.acquire()
        self._followers.append(follower)
        self._wake()  # the background thread gives way
        return follower

    def _watch(self) -> None:
        """Parks the background thread until there are requests that no user thread is driving.

        A thread that has called `isend` or `irecv` usually waits soon, and a thread that moves its own messages is
        faster than one that is woken for them. So this thread does nothing while other threads drive again and again.
        """
        state = self._state
        while not self.stopped:
            is_needed = not (self._driver or self._followers) and (state.has_work or bool(state.settled))
            self._watching = self._num_turns != self._num_turns_seen
            if is_needed and not self._watching:
                return
            self._num_turns_seen = self._num_turns if self._watching else -1
            self._called.wait(BATCH_DELAY_S if self._watching else IDLE_RECHECK_S)

    # ------------------------------------------------------------ without the lock

    def ensure_progress(self) -> None:
        """Makes the background thread drive at once if no thread drives: a waiter of a request is not a thread."""
        with self.entrance, self.lock:
            self._num_turns_seen, self._watching = self._num_turns, False
            self.changed()

    def settle(self) -> None:
        """Notifies the waiters of complete requests, one by one: a callback may wait for the next of them."""
        while self._state.settled:
            try:
                request = self._state.settled.popleft()
            except IndexError:
                return
            request.settle()

    def drive(self, mine: Request) -> None:
        """Moves bytes until the request is done, or waits while another thread moves them.

        After an exception from a signal handler (KeyboardInterrupt), other threads continue the request.
        """
        while not mine.done:
            try:
                self._drive(mine)
            finally:
                self.settle()

    def _run(self) -> None:
        while not self.stopped:
            self._drive(None)
            self.settle()

    def _drive(self, mine: Request | None) -> None:
        """Drives until the request is done or callbacks are due; waits while another thread drives."""
        follower, driver = None, object()
        try:
            with self.lock:
                if mine is None:
                    self._watch()
                else:
                    self._num_turns += 1
                    if self._driver and not mine.done:
                        follower = self._follow()
                if not (self._driver or self.stopped):
                    self._driver = driver
            if follower is not None:
                follower.acquire(timeout=IDLE_RECHECK_S)
            elif self._driver is driver:
                self._move(mine)
        finally:
            try:
                self._leave(driver, follower)
            except BaseException:  # from a signal handler: other threads wait for `_leave`
                self._leave(driver, follower)
                raise

    def _leave(self, driver: object, follower: threading.Lock | None) -> None:
        """Stops driving, or leaves the followers; idempotent."""
        with self.lock:
            if follower in self._followers:
                self._followers.remove(follower)
            if self._driver is driver:
                self._driver, self.sleeping = None, False
            self.changed()

    # ------------------------------------------------------------ the driver

    def _move(self, mine: Request | None) -> None:
        """Moves bytes until the request is done or callbacks are due; without one, until another thread can drive."""
        state, policy = self._state, self._spin_policy
        spins_until = 0.0
        in_vain = False  # the last turn moved nothing
        while True:
            with self.lock:
                self.sleeping = False
                now = time.monotonic()
                moved = self._step(now)
                if state.settled or (mine.done if mine is not None else self._followers or not state.has_work):
                    return
                if moved and in_vain:
                    policy.spin_succeeded()
                if moved or not spins_until:
                    spins_until = now + (0.0 if mine is None else policy.spin_s)
                in_vain = not moved
                self.sleeping = in_vain and now >= spins_until and not self._has_buffered()
                poller = self._pollers.get(self._masks(), self._waker.fileno()) if self.sleeping else None
            if poller is not None:
                poller.poll(1000 * min(max(0.0, state.next_deadline - now), LONGEST_WAIT_S))
                self._waker.drain()
                if mine is not None:
                    policy.slept(time.monotonic() - now)
                    in_vain = False
            elif not moved:
                os.sched_yield()  # the peer may share this core
            with self.entrance:  # held by the next of the waiting threads, which may not be awake yet
                pass

    def _step(self, now: float) -> bool:
        state, moved = self._state, False
        try:
            if now >= state.next_deadline:
                state.expire(now)
            for outgoing in state.outgoing.values():
                state.read_refusals(outgoing, now)
                moved |= bool(outgoing.stream.queue and outgoing.write())
            stuck = state.a_send_is_stuck
            for incoming in state.incoming.values():
                if state.is_wanted(incoming, stuck):
                    came = bool(incoming.receive())
                    moved |= came
                    if not came and incoming.peer in state.lost:
                        incoming.end(state.lost[incoming.peer])
            return moved
        except BaseException as exc:  # from a signal handler: the positions in the streams are unknown
            error = GroupAborted(
                f"sends and receives of group {self._group_name!r}", f"{described_error(exc)} interrupted them"
            )
            error.__cause__ = exc
            state.fail(error)
            raise

    def _has_buffered(self) -> bool:
        """Whether a wanted connection has bytes that poll does not report."""
        state = self._state
        stuck = state.a_send_is_stuck
        return any(one.has_buffered and state.is_wanted(one, stuck) for one in state.incoming.values())

    def _masks(self) -> dict[int, int]:
        state = self._state
        stuck = state.a_send_is_stuck
        masks = {one.sock.fileno(): select.POLLIN for one in state.incoming.values() if state.is_wanted(one, stuck)}
        for connection in state.outgoing.values():
            if connection.is_open:  # refusals may come at any time
                masks[connection.sock.fileno()] = select.POLLIN | (select.POLLOUT if connection.stream.queue else 0)
        return masks

    def stop(self) -> None:
        """Ends the background thread and closes the connections, after all requests have failed; waits for no peer."""
        limit = time.monotonic() + CLOSE_LIMIT_S
        with self.lock:
            self.stopped = True
            self._called.notify()
            follower = self._follow()
        while self._driver and (left_s := limit - time.monotonic()) > 0:
            follower.acquire(timeout=left_s)
            with self.lock:
                follower = self._follow()
        with self.lock:
            for outgoing in self._state.outgoing.values():
                outgoing.say_goodbye()
                outgoing.end("the connection was closed here")
            for incoming in self._state.incoming.values():
                incoming.end("the connection was closed here")
            self._waker.close()
        self.settle()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(CLOSE_LIMIT_S)
