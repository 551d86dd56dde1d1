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
from rpcdist.collectives._transports.p2p.peer_sockets import (
    CONNECTION_ENDS,
    ConnectionEnded,
    IncomingConnection,
    OutgoingConnection,
    why_it_ended,
)
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
        self._num_followers = 0
        self._lead_is_free = threading.Condition(self.lock)  # or a request is done
        self._called = threading.Condition(self.lock)  # the group's own thread
        self._stopped = False

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
        self._pass_on(settles)

    def _pass_on(self, is_needed: bool = False) -> None:
        if self._num_followers:
            self._lead_is_free.notify_all()
        elif not self._leading and not self._stopped and (is_needed or self._state.has_work):
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self.thread.start()
            self._called.notify()

    def _take_lead(self, mine: Request | None) -> bool:
        """Waits until no other thread leads; returns whether there is a reason to lead."""
        self._num_followers += 1
        try:
            while self._leading and not (mine is not None and mine.done):
                self._lead_is_free.wait()
        finally:
            self._num_followers -= 1
        if mine is not None and mine.done:
            return False
        self._leading = True
        return True

    # ------------------------------------------------------------ without the lock

    def settle(self) -> None:
        """Notifies the waiters of complete requests, one by one: a callback may wait for the next of them."""
        while self._state.settled:
            try:
                request = self._state.settled.popleft()
            except IndexError:
                return
            request.settle()

    def drive(self, mine: Request | None = None) -> None:
        """Moves bytes, or waits while another thread does.

        After an exception from a signal handler (KeyboardInterrupt) the other threads go on with the request.

        Args:
            mine: returns when this is done; without it, when nothing is pending, or another thread can lead.
        """
        try:
            while self._lead(mine):
                self.settle()
        finally:
            self.settle()

    def _lead(self, mine: Request | None) -> bool:
        """Moves bytes; returns whether it stopped only because callbacks are due."""
        with self.lock:
            if not self._take_lead(mine):
                return False
        spin_s = 0.0 if mine is None else self._spin_s
        until = time.monotonic() + spin_s
        ready: Collection[int] = ()
        try:
            while True:
                with self.lock:
                    now = time.monotonic()
                    moved = self._step(now, ready)
                    if self._state.settled:
                        return True
                    if mine.done if mine is not None else self._num_followers or not self._state.has_work:
                        return False
                    rests = self.sleeping = not moved and now >= until
                    masks = self._masks() if rests else {}
                    limit_s = max(0.0, self._state.next_deadline - now)
                ready = ()
                if moved:
                    until = now + spin_s
                elif rests:
                    ready = self._sleep(masks, limit_s)
                else:
                    os.sched_yield()  # the peer may share this core
        finally:
            with self.lock:
                self._leading = False
                self._pass_on()

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
        connection = state.incoming.get(peer)
        if connection is None or connection.stream.inside_message or connection.stream.said_goodbye:
            return False
        with self.lock:
            if self._leading or not state.is_calm or connection.ended is not None:
                return False
            self._leading = True
        stream, num_bytes, whole = connection.stream, 0, HEADER_BYTES + tensor.nbytes
        try:
            code = dtype_code(tensor.dtype)
            header = pack_header(MessageFrame.MESSAGE, code, tag, stream.num_messages, tensor.nbytes)
            until = time.monotonic() + self._spin_s
            while state.is_calm:
                came = connection.receive(stream.staging[num_bytes:])
                num_bytes += came
                known = min(num_bytes, HEADER_BYTES)
                if came and (num_bytes >= whole or stream.staging[:known] != header[:known]):
                    break
                if time.monotonic() > until:
                    break
                os.sched_yield()  # the peer may share this core
            if num_bytes == whole and stream.staging[:HEADER_BYTES] == header:
                stream.num_messages += 1
                memory_of(tensor)[:] = stream.staging[HEADER_BYTES:whole]
                return True
            if num_bytes:
                with self.lock:
                    stream.advance(num_bytes)
        except CONNECTION_ENDS as exc:
            with self.lock:
                state.end_incoming(connection, why_it_ended(exc))
        except BaseException as exc:  # of a signal handler: the position in the stream is unknown
            with self.lock:
                state.fail(exc)
            raise
        finally:
            with self.lock:
                self._leading = False
                self._pass_on(bool(state.settled))
        return False

    # ------------------------------------------------------------ all sockets; the lock is held

    def _step(self, now: float, ready: Collection[int]) -> bool:
        """Does what can be done without waiting; returns whether anything changed."""
        try:
            self._state.expire(now)
            moved = []
            for connection in list(self._state.outgoing.values()):
                if ready and connection.sock is not None and connection.sock.fileno() in ready:
                    self._state.read_refusals(connection)
                moved.append(self.write(connection))
            stuck = self._state.a_send_is_stuck
            moved += [self._read(connection, stuck) for connection in list(self._state.incoming.values())]
            return any(moved)
        except BaseException as exc:  # of a signal handler: the positions in the streams are unknown
            self._state.fail(exc)
            raise

    def write(self, connection: OutgoingConnection) -> bool:
        """Sends what the socket takes; returns whether it took anything."""
        moved = False
        try:
            for _ in range(_MOST_STEPS):
                if connection.sock is None or not connection.stream or (sent := connection.write()) is None:
                    break
                moved = True
                for request in sent:
                    self._state.complete(request)
        except CONNECTION_ENDS as exc:
            self._state.end_outgoing(connection, why_it_ended(exc))
        except BaseException:  # of a signal handler: the position in the stream is unknown
            self._state.end_outgoing(connection, "a send was interrupted")
            raise
        return moved

    def _read(self, connection: IncomingConnection, stuck: bool) -> bool:
        state, moved = self._state, False
        try:
            for _ in range(_MOST_STEPS):
                if state.settled or not state.is_wanted(connection, stuck):
                    break
                if not connection.read():
                    if connection.source in state.lost:
                        raise ConnectionEnded(state.lost[connection.source])
                    break
                moved = True
        except CONNECTION_ENDS as exc:
            state.end_incoming(connection, why_it_ended(exc))
            return True
        return moved

    def _masks(self) -> dict[int, int]:
        """What the leader waits for: the events by descriptor."""
        state = self._state
        stuck = state.a_send_is_stuck
        masks = {one.sock.fileno(): select.POLLIN for one in state.incoming.values() if state.is_wanted(one, stuck)}
        for connection in state.outgoing.values():
            if connection.sock is not None:  # refusals may come at any time
                masks[connection.sock.fileno()] = select.POLLIN | (select.POLLOUT if connection.stream else 0)
        return masks

    # ------------------------------------------------------------ the group's own thread, and the end

    def _run(self) -> None:
        while True:
            with self.lock:
                while not self._stopped and (
                    self._leading or self._num_followers or not (self._state.has_work or self._state.settled)
                ):
                    self._called.wait()
                if self._stopped:
                    return
            self.drive()

    def stop(self) -> None:
        """Ends the group's thread, and closes the connections, after everything has failed; waits for no peer."""
        with self.lock:
            self._stopped = True
            self.wake()
            self._called.notify()
            self._num_followers += 1
            self._lead_is_free.wait_for(lambda: not self._leading, PROGRESS_STOP_LIMIT_S)
            self._num_followers -= 1
            for incoming in self._state.incoming.values():
                incoming.close("the connection was closed here")
            for outgoing in self._state.outgoing.values():
                outgoing.close("the connection was closed here", goodbye=True)
            self._waker.close()
        self.settle()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(PROGRESS_STOP_LIMIT_S)
