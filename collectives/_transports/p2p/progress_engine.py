"""Moves the bytes of one rank's messages between its sockets and its `MessageState`."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Final

from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.peer_sockets import InLink, LinkEnded, OutLink
from rpcdist.collectives._transports.p2p.polling import wait_ready
from rpcdist.collectives._transports.p2p.progress_lead import ProgressLead
from rpcdist.collectives._transports.p2p.requests import Request
from rpcdist.errors import ProtocolViolation

__all__ = ["ProgressEngine"]

_MOST_STEPS: Final = 64  # on one socket, before the others have their turn
_MOST_SPINNING: Final = 4  # sockets that a blocked thread tries before it sleeps


class ProgressEngine:
    """The work of whoever leads, and of a thread that writes its own message; see [Note: progress] in `Messenger`.

    Args:
        state: what is to be done.
        spin_s: how long a blocked thread tries its socket before it sleeps, in seconds.
        name: of the group's own thread.

    Attributes:
        lock: guards the state and the lead.
        lead: who leads.
    """

    def __init__(self, state: MessageState, spin_s: float, name: str) -> None:
        self.state = state
        self.spin_s = spin_s
        self.lock = threading.Lock()
        self._untold: deque[Request] = deque()
        self.lead = ProgressLead(self.lock, self._lead, self._is_needed, self._free, name)

    def fail(self, error: BaseException) -> None:
        """Everything that is pending fails with this error, and so does everything later; idempotent."""
        with self.lock:
            if self.state.error is None:
                self.state.error = error
            self.lead.changed()
            leads = self.lead.take()
            if leads:
                self.state.attend(time.monotonic())
                self.lead.pass_on_locked()
        if leads:
            self.settle()

    def _free(self) -> None:
        """Nobody leads any more: closes what no thread uses. The lock is held."""
        for incoming in self.state.incoming.values():
            incoming.close()
        for outgoing in self.state.outgoing.values():
            if not outgoing.busy:
                outgoing.close()
        self.lead.alarm.close()

    # ------------------------------------------------------------ the leader

    def _is_needed(self) -> bool:
        return bool(self.state.pending) or self.state.has_leftovers()

    def settle(self, own: Request | None = None) -> None:
        """Tells the waiters of what was decided; `own` is the caller's. Who leads passes none, and knows by itself."""
        with self.lock:
            settled, self.state.settled = self.state.settled, []
            if own is not None and any(request is not own for request in settled):
                self.lead.changed()  # the leader may sleep for one of them
        self._untold += settled
        while True:
            try:
                request = self._untold.popleft()  # one by one: a callback may wait for the next of them
            except IndexError:
                return
            request.settle()

    def _lead(self, mine: Request | None) -> None:
        """Moves bytes until `mine` is settled, or nothing is pending."""
        state, lead = self.state, self.lead
        while True:
            with self.lock:
                state.attend(time.monotonic())
                readers, writers = state.interests()
                version = lead.version
            if state.settled or self._untold:
                self.settle()
                if mine is None or not mine.done:
                    continue  # callbacks may have led themselves
            if mine is None:
                if lead.has_followers or not self._is_needed():
                    return
            elif mine.done:
                mine.await_settled()
                return
            try:
                moved = self._step(readers, writers) or (mine is not None and self._spin(readers, writers, version))
            except BaseException as exc:  # a signal's: nobody knows how far the streams are
                self.fail(exc)
                raise
            if not moved:
                self._sleep(readers, writers, version)

    def _step(self, readers: list[InLink], writers: list[OutLink]) -> bool:
        """Tries every socket once; whether anything changed."""
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

    def _spin(self, readers: list[InLink], writers: list[OutLink], version: int) -> bool:
        """Goes on trying for a moment, which is shorter than waking up takes."""
        if not 0 < len(readers) + len(writers) <= _MOST_SPINNING:
            return False
        until = time.monotonic() + self.spin_s
        while time.monotonic() < until and version == self.lead.version:
            if self._step(readers, writers):
                return True
        return False

    def _sleep(self, readers: list[InLink], writers: list[OutLink], version: int) -> None:
        """Until a socket is ready, a deadline comes, or something changed since `version`."""
        state, lead = self.state, self.lead
        with self.lock:
            if version != lead.version:
                return
            lead.sleeping = True
            watched = [(link, link.sock) for link in state.outgoing.values() if link.sock is not None]
            to_read = [lead.alarm.sock, *(link.sock for link in readers), *(sock for _, sock in watched)]
            to_write = [link.sock for link in writers if link.sock is not None]
            limit_s = max(0.0, state.next_deadline - time.monotonic())
        ready = wait_ready(to_read, to_write, None if limit_s == math.inf else limit_s)
        with self.lock:
            lead.sleeping = False
        if lead.alarm.sock.fileno() in ready:
            lead.alarm.silence()
        for link, sock in watched:
            if sock.fileno() in ready:
                with self.lock:
                    mine = not link.busy and link.ended is None
                    link.busy |= mine
                if mine:
                    self.read_refusals(link)
                    self.release(link)

    # ------------------------------------------------------------ one socket

    def _read(self, link: InLink) -> bool:
        """For the leader: receives what is there; whether anything changed."""
        state = self.state
        for step in range(_MOST_STEPS):
            try:
                num_bytes = link.receive()
            except LinkEnded as exc:
                with self.lock:
                    state.end_incoming(link, str(exc))
                return True
            if num_bytes == 0:
                if link.source not in state.lost:
                    return step > 0
                with self.lock:
                    state.end_incoming(link, state.lost[link.source])
                return True
            with self.lock:
                self._digest(link, num_bytes)
                if state.settled or link.ended is not None or not state.is_wanted(link, a_send_is_stuck=True):
                    return True
        return True

    def _digest(self, link: InLink, num_bytes: int) -> None:
        try:
            link.stream.advance(num_bytes)
        except ProtocolViolation as exc:
            self.state.end_incoming(link, f"it does not follow the protocol ({exc}); the connection was closed")
        except (MemoryError, RuntimeError) as exc:  # torch raises RuntimeError when memory is short
            self.state.end_incoming(link, f"there is no memory to keep its message ({exc}); the connection was closed")

    def write(self, link: OutLink) -> bool:
        """For the thread that made the link busy: sends what goes, and frees the link; whether anything changed."""
        for step in range(_MOST_STEPS):
            if link.ended is not None or not link.stream:
                break
            try:
                num_bytes = link.send()
            except LinkEnded as exc:
                with self.lock:
                    self.state.end_outgoing(link, str(exc))
                break
            if num_bytes == 0:
                self.release(link)
                return step > 0
            with self.lock:
                for request in link.stream.advance(num_bytes):
                    self.state.decide(request)
                if not link.stream:
                    self.release_locked(link)
                    return True
        self.release(link)
        return True

    def read_refusals(self, link: OutLink) -> None:
        """For the thread that made the link busy."""
        try:
            refusals = link.read_refusals()
        except LinkEnded as exc:
            with self.lock:
                self.state.end_outgoing(link, str(exc))
            return
        for expected, header in refusals:
            with self.lock:
                self.state.refused(link, expected, header)

    def release(self, link: OutLink) -> None:
        with self.lock:
            self.release_locked(link)

    def release_locked(self, link: OutLink) -> None:
        link.busy = False
        if self.state.error is not None:
            link.stream.clear()
        if self.lead.stopped:
            link.close()
