"""The progress engine: moves the bytes of one rank's messages between its sockets and its `MessageState`."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from typing import Final

from rpcdist.collectives._transports.p2p.leadership import Leadership
from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.peer_sockets import ConnectionEnded, IncomingConnection, OutgoingConnection
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.collectives._transports.pollers import Pollers
from rpcdist.errors import ProtocolViolation
from rpcdist.time_limits import SELECT_LIMIT_MS

__all__ = ["ProgressEngine"]

_MOST_STEPS: Final = 64  # on one socket before it is the others' turn
_MOST_SPINNING: Final = 4  # sockets that a blocked thread tries before it sleeps


class ProgressEngine:
    """What the leading thread does, and a thread that writes its own message; see [Note: progress] in `messenger`.

    Args:
        state: the requests, messages and connections.
        spin_s: how long a blocked thread tries its socket before it sleeps, in seconds.
        name: the name of the group's own thread.

    Attributes:
        lock: guards the state and the leadership.
        leadership: which thread leads.
    """

    def __init__(self, state: MessageState, spin_s: float, name: str) -> None:
        self.state = state
        self.spin_s = spin_s
        self.lock = threading.Lock()
        self._pollers = Pollers()
        self._to_notify: deque[Request] = deque()
        self.leadership = Leadership(self.lock, self._lead, self._is_needed, self._free, name)

    def fail(self, error: BaseException) -> None:
        """Fails everything that is pending, and everything later, with this error; idempotent."""
        with self.lock:
            if self.state.error is None:
                self.state.error = error
            self.leadership.changed()
            leads = self.leadership.take()
            if leads:
                self.state.fail_overdue(time.monotonic())
                self.leadership.pass_on_locked()
        if leads:
            self.settle()

    def _free(self) -> None:
        """Closes the connections that no thread uses, when no thread leads any more. The lock is held."""
        for incoming in self.state.incoming.values():
            incoming.close()
        for outgoing in self.state.outgoing.values():
            if not outgoing.busy:
                outgoing.close()
        self.leadership.waker.close()

    # ------------------------------------------------------------ the leader

    def _is_needed(self) -> bool:
        return bool(self.state.pending) or self.state.has_leftovers()

    def settle(self, own: Request | None = None) -> None:
        """Notifies the waiters of complete requests; `own` is the caller's request, which the leader does not pass."""
        with self.lock:
            settled, self.state.settled = self.state.settled, []
            if own is not None and any(request is not own for request in settled):
                self.leadership.changed()  # the leader may be sleeping for one of them
        self._to_notify += settled
        while True:
            try:
                request = self._to_notify.popleft()  # one by one: a callback may wait for the next of them
            except IndexError:
                return
            request.settle()

    def _lead(self, mine: Request | None) -> None:
        """Moves bytes until `mine` is settled, or nothing is pending."""
        state, leadership = self.state, self.leadership
        while True:
            with self.lock:
                state.fail_overdue(time.monotonic())
                readers, writers = state.interests()
                version = leadership.version
            if state.settled or self._to_notify:
                self.settle()
                if mine is None or not mine.done:
                    continue  # callbacks may have led in between
            if mine is None:
                if leadership.has_followers or not self._is_needed():
                    return
            elif mine.done:
                mine.await_settled()
                return
            try:
                moved = self._step(readers, writers) or (mine is not None and self._spin(readers, writers, version))
            except BaseException as exc:  # of a signal handler: the positions in the streams are unknown
                self.fail(exc)
                raise
            if not moved:
                self._sleep(readers, writers, version)

    def _step(self, readers: list[IncomingConnection], writers: list[OutgoingConnection]) -> bool:
        """Tries every socket once; returns whether anything changed."""
        moved = False
        for incoming in readers:
            moved |= self._read(incoming)
        for outgoing in writers:
            with self.lock:
                mine = not outgoing.busy and bool(outgoing.stream)
                outgoing.busy |= mine
            if mine:
                moved |= self.write(outgoing)
        return moved

    def _spin(self, readers: list[IncomingConnection], writers: list[OutgoingConnection], version: int) -> bool:
        """Goes on trying for a moment that is shorter than a wake-up takes; returns whether anything changed."""
        if not 0 < len(readers) + len(writers) <= _MOST_SPINNING:
            return False
        until = time.monotonic() + self.spin_s
        while time.monotonic() < until and version == self.leadership.version:
            if self._step(readers, writers):
                return True
            os.sched_yield()  # the peer may share this core
        return False

    def _sleep(self, readers: list[IncomingConnection], writers: list[OutgoingConnection], version: int) -> None:
        """Sleeps until a socket is ready, a deadline passes, or something has changed since `version`."""
        state, leadership = self.state, self.leadership
        with self.lock:
            if version != leadership.version:
                return
            leadership.sleeping = True
            watched = [
                (connection, connection.sock) for connection in state.outgoing.values() if connection.sock is not None
            ]
            masks = {connection.sock.fileno(): select.POLLIN for connection in readers}
            masks |= {sock.fileno(): select.POLLIN for _, sock in watched}
            for connection in writers:
                if connection.sock is not None:
                    masks[connection.sock.fileno()] = select.POLLIN | select.POLLOUT
            limit_s = max(0.0, state.next_deadline - time.monotonic())
        poller = self._pollers.get(masks, leadership.waker.fileno())
        limit_ms = None if limit_s == math.inf else min(limit_s * 1000, SELECT_LIMIT_MS)
        ready = {descriptor for descriptor, _ in poller.poll(limit_ms)}
        with self.lock:
            leadership.sleeping = False
        if leadership.waker.fileno() in ready:
            leadership.waker.drain()
        for connection, sock in watched:
            if sock.fileno() in ready:
                with self.lock:
                    mine = not connection.busy and connection.ended is None
                    connection.busy |= mine
                if mine:
                    self.read_refusals(connection)
                    self.release(connection)

    # ------------------------------------------------------------ one socket

    def _read(self, connection: IncomingConnection) -> bool:
        """Receives what has come, on the leader's thread; returns whether anything changed."""
        state = self.state
        for step in range(_MOST_STEPS):
            try:
                num_bytes = connection.receive()
            except ConnectionEnded as exc:
                with self.lock:
                    state.end_incoming(connection, str(exc))
                return True
            if num_bytes == 0:
                if connection.source not in state.lost:
                    return step > 0
                with self.lock:
                    state.end_incoming(connection, state.lost[connection.source])
                return True
            with self.lock:
                self.digest(connection, num_bytes)
                if (
                    state.settled
                    or connection.ended is not None
                    or not state.is_wanted(connection, a_send_is_stuck=True)
                ):
                    return True
        return True

    def digest(self, connection: IncomingConnection, num_bytes: int) -> None:
        """Takes bytes that were received, on the leader's thread; the lock is held."""
        try:
            connection.stream.advance(num_bytes)
        except ProtocolViolation as exc:
            self.state.end_incoming(connection, f"it does not follow the protocol ({exc}); the connection was closed")
        except (MemoryError, RuntimeError) as exc:  # torch raises RuntimeError when memory is short
            self.state.end_incoming(
                connection, f"there is no memory to keep its message ({exc}); the connection was closed"
            )

    def write(self, connection: OutgoingConnection) -> bool:
        """Sends as much as possible, on the thread that made the connection busy, and frees the connection.

        Returns:
            Whether anything changed.
        """
        for step in range(_MOST_STEPS):
            if connection.ended is not None or not connection.stream:
                break
            try:
                num_bytes = connection.send()
            except ConnectionEnded as exc:
                with self.lock:
                    self.state.end_outgoing(connection, str(exc))
                break
            if num_bytes == 0:
                self.release(connection)
                return step > 0
            with self.lock:
                for request in connection.stream.advance(num_bytes):
                    self.state.complete(request)
                if not connection.stream:
                    self.release_locked(connection)
                    return True
        self.release(connection)
        return True

    def read_refusals(self, connection: OutgoingConnection) -> None:
        """Reads refusals, on the thread that made the connection busy."""
        try:
            refusals = connection.read_refusals()
        except ConnectionEnded as exc:
            with self.lock:
                self.state.end_outgoing(connection, str(exc))
            return
        for expected, header in refusals:
            with self.lock:
                self.state.refused(connection, expected, header)

    def release(self, connection: OutgoingConnection) -> None:
        with self.lock:
            self.release_locked(connection)

    def release_locked(self, connection: OutgoingConnection) -> None:
        connection.busy = False
        if self.state.error is not None:
            connection.stream.clear()
        if self.leadership.stopped:
            connection.close()
