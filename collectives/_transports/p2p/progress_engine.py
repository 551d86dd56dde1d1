"""The progress engine: moves the bytes of one rank's messages between its sockets and its `MessageState`.

1. One thread at a time leads: it alone reads the sockets and sleeps in poll. Everything but the sleep, and the moment
   in which `receive_small` spins, is done with the lock held; no system call under it blocks.
2. While a request is pending, some thread leads or has been called to: a thread that blocks in `send` or `recv`, else
   the group's own thread, which is started when it is first needed.
3. A leader stops when its own request is done, and for callbacks, which may do anything: also wait for another request,
   and so lead again. A thread that waits then takes the lead, else the group's thread.
4. Whoever changes what concerns the leader or those who follow calls `changed`, or `wake` if that is only the leader.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Collection
from typing import Final

import torch

from rpcdist.collectives._operations.operation import dtype_code
from rpcdist.collectives._transports.memory import memory_of
from rpcdist.collectives._transports.p2p.message_format import HEADER_BYTES, MessageFrame, pack_header
from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.peer_sockets import ConnectionEnded, IncomingConnection, OutgoingConnection
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.collectives._transports.pollers import Pollers, Waker
from rpcdist.time_limits import PROGRESS_STOP_LIMIT_S, SELECT_LIMIT_MS

__all__ = ["ProgressEngine"]

_MOST_STEPS: Final = 64  # on one socket before it is the others' turn


class ProgressEngine:
    """Lets the threads of one rank move its messages, one at a time; see [Note: progress] in `messenger`.

    Args:
        state: the requests, messages and connections.
        spin_s: how long a blocked thread tries its sockets before it sleeps, in seconds.
        name: the name of the group's own thread.

    Attributes:
        lock: guards the state and all that is here.
        sleeping: the leader sleeps, or is about to.
        thread: the group's own thread; None until it is needed.
        stopped: the end has begun: no thread leads any more.
    """

    def __init__(self, state: MessageState, spin_s: float, name: str) -> None:
        self.lock = threading.Lock()
        self.sleeping = False
        self.thread: threading.Thread | None = None
        self._state = state
        self._spin_s = spin_s
        self._name = name
        self._pollers = Pollers()
        self._waker = Waker()
        self._leading = False
        self._moved = False  # whether any bytes were in the leader's turn
        self._num_followers = 0
        self._lead_is_free = threading.Condition(self.lock)  # or a request is done
        self._called = threading.Condition(self.lock)  # the group's own thread
        self.stopped = False

    # ------------------------------------------------------------ with the lock held

    def wake(self) -> None:
        """Ends the leader's sleep."""
        if self.sleeping:
            self.sleeping = False
            self._waker.wake()

    def changed(self, settles: bool = False) -> None:
        """Announces a change to the leader and to those who follow; makes sure that some thread leads.

        Args:
            settles: that thread shall call `settle`, too: the caller does not.
        """
        self.wake()
        if self._num_followers:
            self._lead_is_free.notify_all()
        elif not (self._leading or self.stopped) and (settles or self._state.has_work):
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self.thread.start()
            self._called.notify()

    def _follow(self, mine: Request | None) -> None:
        """Waits until no other thread leads, or a request is done; the group's thread, until it is needed."""
        if mine is None:
            state = self._state
            while not self.stopped and (self._leading or self._num_followers or not (state.has_work or state.settled)):
                self._called.wait()
            return
        self._num_followers += 1
        try:
            while self._leading and not mine.done:
                self._lead_is_free.wait()
        finally:
            self._num_followers -= 1

    # ------------------------------------------------------------ without the lock

    def settle(self) -> None:
        """Notifies the waiters of complete requests, one by one: a callback may wait for the next of them."""
        while self._state.settled:
            try:
                request = self._state.settled.popleft()
            except IndexError:
                return
            request.settle()

    def drive(self, mine: Request) -> None:
        """Moves bytes until the request is done, or waits while another thread does.

        After an exception from a signal handler (KeyboardInterrupt) the other threads go on with the request.
        """
        try:
            while not mine.done:
                self._lead(mine)
                self.settle()
        finally:
            self.settle()

    def _run(self) -> None:
        while not self.stopped:
            self._lead(None)
            self.settle()

    def _lead(self, mine: Request | None) -> None:
        """Moves bytes until its request is done or callbacks are due; without one, until another thread can lead."""
        state, leads = self._state, False
        spin_s = 0.0 if mine is None else self._spin_s
        ready: Collection[int] = ()
        has_rested = mine is not None
        try:
            with self.lock:
                self._follow(mine)
                leads = not (self._leading or self.stopped)
                self._leading |= leads
            until = time.monotonic() + spin_s
            while leads:
                with self.lock:
                    now = time.monotonic()
                    # The group's thread begins with a sleep: the callers have tried their sockets, and may call for
                    # more. But no sleep ends because nothing more comes from a lost rank.
                    moved = (has_rested or bool(state.lost)) and self._step(now, ready)
                    if state.settled or (mine.done if mine is not None else self._num_followers or not state.has_work):
                        return
                    rests = self.sleeping = not moved and now >= until
                    masks = self._masks() if rests else {}
                    limit_s = max(0.0, state.next_deadline - now)
                ready = ()
                if moved:
                    until = now + spin_s
                elif rests:
                    ready, has_rested = self._sleep(masks, limit_s), True
                else:
                    os.sched_yield()  # the peer may share this core
        finally:
            with self.lock:
                self._leading &= not leads
                if not self._leading:
                    self.changed()

    def _sleep(self, masks: dict[int, int], limit_s: float) -> Collection[int]:
        """Sleeps until a socket is ready, time is over, or `wake`; returns the descriptors that are ready."""
        poller = self._pollers.get(masks, self._waker.fileno())
        ready = {descriptor for descriptor, _ in poller.poll(min(limit_s * 1000, SELECT_LIMIT_MS))}
        self.sleeping = False
        if self._waker.fileno() in ready:
            self._waker.drain()
        return ready

    def receive_small(self, tensor: torch.Tensor, peer: int, tag: int) -> bool:
        """Receives a message that comes within a moment, if nothing else is under way: the shortest way.

        In most programs a rank sends or receives one message at a time. Then neither a request, nor the matcher is
        needed. What it spares is Python code: two ranks that take turns on one core find the processor's caches and
        branch predictors cold after each message, and then every line counts.

        Args:
            tensor: no larger than `SMALL_BYTES`.
            peer: the sender's rank in the group.
            tag: the message's.

        Returns:
            Whether it did. What came instead is where the usual way finds it.
        """
        state = self._state
        with self.lock:
            connection = state.incoming.get(peer)
            if connection is None or not connection.is_idle or self._leading or not state.is_calm:
                return False
            self._leading = True
        stream, num_bytes, is_here = connection.stream, 0, False
        whole = HEADER_BYTES + tensor.nbytes
        try:
            code = dtype_code(tensor.dtype)
            header = pack_header(MessageFrame.MESSAGE, code, tag, stream.num_messages, tensor.nbytes)
            until = time.monotonic() + self._spin_s
            while state.is_calm and time.monotonic() < until:
                num_bytes += connection.receive(stream.staging[num_bytes:]) or 0
                known = min(num_bytes, HEADER_BYTES)
                if num_bytes >= whole or stream.staging[:known] != header[:known]:
                    break
                os.sched_yield()  # the peer may share this core
            is_here = num_bytes == whole and stream.staging[:HEADER_BYTES] == header
            if is_here:
                stream.num_messages += 1
                memory_of(tensor)[:] = stream.staging[HEADER_BYTES:whole]
            elif num_bytes:
                with self.lock:
                    connection.take(num_bytes)
        except ConnectionEnded as exc:
            with self.lock:
                state.end_incoming(connection, str(exc))
        except BaseException as exc:  # of a signal handler: the position in the stream is unknown
            with self.lock:
                state.fail(exc)
            raise
        finally:
            with self.lock:
                self._leading = False
                self.changed(bool(state.settled))
        return is_here

    # ------------------------------------------------------------ all sockets; the lock is held

    def _step(self, now: float, ready: Collection[int]) -> bool:
        """Does what can be done without waiting; returns whether any bytes were moved."""
        state = self._state
        self._moved = False
        try:
            state.expire(now)
            for outgoing in list(state.outgoing.values()):
                if ready and outgoing.is_open and outgoing.sock.fileno() in ready:
                    state.read_refusals(outgoing)
                self.write(outgoing)
            stuck = state.a_send_is_stuck
            for incoming in list(state.incoming.values()):
                self._read(incoming, stuck)
            return self._moved
        except BaseException as exc:  # of a signal handler: the positions in the streams are unknown
            state.fail(exc)
            raise

    def write(self, connection: OutgoingConnection) -> None:
        """Sends what the socket takes."""
        try:
            for _ in range(_MOST_STEPS):
                if not (connection.is_open and connection.stream) or (sent := connection.write()) is None:
                    return
                self._moved = True
                for request in sent:
                    self._state.complete(request)
        except ConnectionEnded as exc:
            self._state.end_outgoing(connection, str(exc))
        except BaseException:  # of a signal handler: the position in the stream is unknown
            self._state.end_outgoing(connection, "a send was interrupted")
            raise

    def _read(self, connection: IncomingConnection, stuck: bool) -> None:
        state = self._state
        try:
            for _ in range(_MOST_STEPS):
                if state.settled or not state.is_wanted(connection, stuck):
                    return
                if not connection.read():
                    if connection.source in state.lost:
                        raise ConnectionEnded(state.lost[connection.source])
                    return
                self._moved = True
        except ConnectionEnded as exc:
            state.end_incoming(connection, str(exc))

    def _masks(self) -> dict[int, int]:
        """What the leader waits for: the events by descriptor."""
        state = self._state
        stuck = state.a_send_is_stuck
        masks = {one.sock.fileno(): select.POLLIN for one in state.incoming.values() if state.is_wanted(one, stuck)}
        for connection in state.outgoing.values():
            if connection.is_open:  # refusals may come at any time
                masks[connection.sock.fileno()] = select.POLLIN | (select.POLLOUT if connection.stream else 0)
        return masks

    def stop(self) -> None:
        """Ends the group's thread, and closes the connections, after everything has failed; waits for no peer."""
        with self.lock:
            self.stopped = True
            self.wake()
            self._called.notify()
            self._num_followers += 1
            self._lead_is_free.wait_for(lambda: not self._leading, PROGRESS_STOP_LIMIT_S)
            self._num_followers -= 1
            for outgoing in self._state.outgoing.values():
                outgoing.say_goodbye()
            for connection in (*self._state.outgoing.values(), *self._state.incoming.values()):
                connection.close()
            self._waker.close()
        self.settle()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(PROGRESS_STOP_LIMIT_S)
