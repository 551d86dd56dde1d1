"""This process's own connection to one other worker.

    IDLE --first message--> CONNECTING --proven--> UP --connection ends--> CONNECTING --peer_timeout--> LOST
                                                                                LOST --revive--> CONNECTING
                                                                                LOST --heard, and reached again--> UP

Messages that wait while CONNECTING are sent when UP. A worker that refuses connections, or whose address belongs to
another process by now, is LOST at once, and gone; a silent one is LOST after `peer_timeout`, and may only have been
stopped for a while. A worker with a connection of its own to this process lives, even if ours fails; it is LOST after
it could not be reached for several peer timeouts, since calls to it would wait forever.

A process that lacks a descriptor, port or thread for a connection draws no conclusion about the other one, and stays
CONNECTING: calls end by their own deadlines, or fail after several peer timeouts as not sent, with the shortage.

[Note: late comers] Control messages to a worker that is LOST are kept. If it lives after all, it must be notified of
the references to its values that this process dropped, or it would keep the values as long as this process lives. They
are sent when it connects to this process, or when this process calls it (`revive`). A firewall may have closed the
port, so messages to a worker that seems gone are also kept, for one lease, the time for which it may count our
references; later ones are dropped.

`ReachLimit` is the only rule for how long a worker is tried before it counts as dead, for calls and for the
coordinator's probes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Literal

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import backoff
from rpcdist.errors import ALTHOUGH_IT_LIVES, AuthenticationFailed, ConnectFailed, RpcdistError, TransportError, text_of
from rpcdist.ids import Identity
from rpcdist.own_shortage import own_shortage
from rpcdist.rpc._peers.control import ControlBody, ControlOutbox
from rpcdist.rpc._peers.directory import Member, PeerEvents
from rpcdist.rpc._peers.network import Connection, Demultiplexer, Lifetime, Network, SendObserver
from rpcdist.time_limits import (
    FIRST_PAUSE_S,
    LAST_ATTEMPT_SHARE,
    LEASE_IN_PEER_TIMEOUTS,
    LONGEST_PAUSE_S,
    MIN_ATTEMPT_S,
    ONE_WAY_IN_PEER_TIMEOUTS,
    REFUSED_GRACE_S,
)
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import Session
from rpcdist.transport.wire_messages import WireMessage

MAX_LATE_ATTEMPTS = 5


def was_refused(exc: TransportError) -> bool:
    """Whether no process listens at that port."""
    return isinstance(exc, ConnectFailed) and "refused" in exc.reason.lower()


class ReachLimit:
    """The limit of the attempts to reach one worker, from now on.

    Args:
        last_seen: when the worker was last heard from, in monotonic seconds, if that counts: silence and reconnecting
            share one timeout.

    Attributes:
        shortage: the resource that this process lacked in the last attempt, if it failed for that; while the shortage
            lasts, no worker is declared dead.
    """

    def __init__(self, timeout_s: float, last_seen: float | None = None) -> None:
        self._grace_s = LAST_ATTEMPT_SHARE * timeout_s
        self._started = time.monotonic()
        # A worker that was silent before its connection broke has used some of its time, but gets one attempt.
        self._limit = max((last_seen or self._started) + timeout_s, self._started + self._grace_s)
        self._longest_heard = self._started + ONE_WAY_IN_PEER_TIMEOUTS * timeout_s
        self._num_failed = 0
        self.shortage: str | None = None

    @property
    def waited_s(self) -> float:
        """Seconds since the first attempt began."""
        return time.monotonic() - self._started

    @property
    def attempt_s(self) -> float:
        """Limit on the next attempt, in seconds."""
        return max(self._limit - time.monotonic(), MIN_ATTEMPT_S)

    def is_over(self, exc: TransportError, is_heard: bool = False) -> bool:
        """Whether the worker is dead, or permanently out of reach, after an attempt has failed.

        Args:
            is_heard: whether the worker shows on its own connection that it lives.
        """
        now = time.monotonic()
        if now > self._limit + self._grace_s and self._num_failed < MAX_LATE_ATTEMPTS:
            self._limit = now + self._grace_s  # this process was delayed, and declares no worker dead
            self._longest_heard = max(self._longest_heard, self._limit)
        self._num_failed += 1
        self.shortage = own_shortage(exc)
        if self.shortage is not None:  # the attempt shows nothing about the worker, which gets another one afterwards
            self._limit = max(self._limit, now + self._grace_s)
            self._longest_heard = max(self._longest_heard, self._limit)
            return False
        if is_heard:
            return now >= self._longest_heard
        # The worker's host reports a closed port; silence may come from a busy network, and takes longer.
        return now >= self._limit or (was_refused(exc) and now - self._started >= REFUSED_GRACE_S)


logger = logging.getLogger(__name__)

ROLE = "rpc"
MAX_SILENT_LOOKS = 3  # peer timeouts without a sign of life, after which a worker out of reach is no longer tried
ONE_WAY = f", {ALTHOUGH_IT_LIVES}: it has its own connection to this worker; look for a firewall or NAT between them"


PeerState = Literal["idle", "connecting", "up", "lost", "closed"]


Unsent = tuple[WireMessage, Sequence[LargeBuffer], SendObserver]
"""A message without a connection, its large buffers, and its observer."""

_Waiting = tuple[WireMessage, Sequence[LargeBuffer], SendObserver | None, float]
"""A message, its large buffers, its observer, and the time since which it waits, in monotonic seconds."""


@dataclass(eq=False, repr=False)
class Peer:
    """The connection to one incarnation of another worker.

    Args:
        timeout_s: silence after which it is declared lost.
        introduction: makes the first message of each connection, or None.
        has_inbound_session: whether the worker shows on its own connection to this process that it lives.
        submit: runs a function with arguments on the pool. Raises `RpcdistError` if the pool accepts no jobs.
        on_lost: called on the I/O loop when the worker is declared dead, with the reason and the unsent messages.

    Attributes:
        is_gone: whether it is LOST, and its address is closed or belongs to another process.
        is_out_of_reach: whether this process cannot connect to it, although its own connection is alive.
    """

    _network: Network
    member: InitVar[Member]
    demultiplexer: InitVar[Demultiplexer]
    _events: PeerEvents
    _lifetime: Lifetime
    _timeout_s: float
    _: KW_ONLY
    introduction: Callable[[Identity], rpc_pb2.Message | None]
    has_inbound_session: Callable[[Identity], bool]
    submit: Callable[..., object]
    on_lost: Callable[[Peer, str, Sequence[Unsent]], object]
    session: Session | None = None
    lost_reason: str | None = None
    last_up: float = field(default_factory=time.monotonic)
    lost_at: float = 0.0
    is_gone: bool = False
    is_out_of_reach: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: list[_Waiting] = field(default_factory=list)
    _control: ControlOutbox = field(default_factory=ControlOutbox)
    _connection: Connection | None = None
    _task: asyncio.Task[None] | None = None

    def __post_init__(self, member: Member, demultiplexer: Demultiplexer) -> None:
        self.identity = member.identity
        self.address = member.address
        self.state: PeerState = "idle"
        # As the handler of its sessions: the peer handles their end, the demultiplexer handles the rest.
        self.allocate = demultiplexer.allocate
        self.borrow = demultiplexer.borrow
        self.stage = demultiplexer.stage
        self.shares_payloads = demultiplexer.shares_payloads
        self.announced_by = demultiplexer.announced_by
        self.on_messages = demultiplexer.on_messages  # not through a method here: every answer would pass through it

    # ------------------------------------------------------------ any thread

    def send(self, message: WireMessage, buffers: Sequence[LargeBuffer] = (), sent: SendObserver | None = None) -> None:
        """Sends a message, or keeps it until the connection is open.

        Args:
            sent: notified of the session and transfer that carry it.

        Raises:
            TransportError: the worker is lost, or this process is shutting down.
        """
        session = self.session  # without the lock: a session that ends meanwhile drops the message, and reports it
        if session is None:
            with self._lock:
                session = self.session
                if session is None:
                    self._queue(message, buffers, sent)
                    return
        number = session.send(message, buffers)
        if sent is not None:
            sent.on_sent(session, number)

    def _queue(self, message: WireMessage, buffers: Sequence[LargeBuffer], sent: SendObserver | None) -> None:
        if self.state in ("lost", "closed"):
            raise TransportError(self.lost_reason or "this process has shut down RPC")
        self._waiting.append((message, buffers, sent, time.monotonic()))
        if self.state == "idle":
            self._start_connecting()

    def send_control(self, body: ControlBody) -> None:
        """Sends a message until it is acknowledged; dropped if the worker is long gone. [Note: late comers]"""
        with self._lock:
            lease_s = LEASE_IN_PEER_TIMEOUTS * self._timeout_s
            if self.state == "closed" or (self.is_gone and time.monotonic() - self.lost_at > lease_s):
                return
            # Numbered under the lock under which `_up` sends unacknowledged messages again: numbers leave in order.
            message = self._control.add(body)
            if self.state == "up" and self._connection is not None:
                self._connection.session.send(message)
            elif self.state == "idle":
                self._start_connecting()

    def acknowledged(self, up_to: int) -> None:
        with self._lock:
            self._control.acknowledged(up_to)

    def revive(self) -> None:
        """Tries again to reach a worker that is LOST."""
        with self._lock:
            if self.state == "lost":
                self.is_gone = False
                self._start_connecting()

    async def settled(self, limit_s: float) -> None:
        """Connects, and waits until the connection is open, or the worker is declared lost; on the I/O loop."""
        self.connect()
        await asyncio.sleep(0)  # lets the loop start the attempt
        if self._task is not None and self.state == "connecting":
            await asyncio.wait({self._task}, timeout=limit_s)

    def connect(self) -> None:
        """Opens the connection if there is none, so that the worker's death is noticed."""
        with self._lock:
            if self.state == "idle":
                self._start_connecting()

    def _start_connecting(self) -> None:
        self.state = "connecting"
        self._network.io.call_soon(self._spawn_connect)

    # ------------------------------------------------------------ I/O loop

    def _spawn_connect(self, broken: str = "", last_seen: float | None = None) -> None:
        if self.state == "connecting":
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()  # a slower attempt
            connecting = self._connect(broken, last_seen)
            self._task = self._network.io.spawn(connecting, f"rpcdist connect to {self.identity.name}")

    async def _connect(self, broken: str = "", last_seen: float | None = None) -> None:
        """Connects, or declares the worker lost.

        Args:
            broken: the reason why the previous connection ended.
            last_seen: when the worker was last heard from, if that counts.
        """
        limit = ReachLimit(self._timeout_s, last_seen)
        pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                connection = await self._open(limit.attempt_s)
            except TransportError as exc:
                is_heard = self.has_inbound_session(self.identity)
                # If another process listens at its address, it has ended, and another attempt would not help, unless it
                # lives behind a NAT.
                is_another = isinstance(exc, AuthenticationFailed)
                if (is_another and not is_heard) or limit.is_over(exc, is_heard and not self.is_out_of_reach):
                    if isinstance(exc, ConnectFailed):
                        exc = ConnectFailed(exc.address, exc.reason, limit.waited_s)
                    reason = (f"{broken}; then {exc}" if broken else str(exc)) + (ONE_WAY if is_heard else "")
                    self.is_out_of_reach = is_heard
                    self._lose(reason, gone=(is_another or was_refused(exc)) and not is_heard)
                    if is_heard and self.state == "lost":  # neither closed nor revived meanwhile
                        trying = self._try_now_and_then()
                        self._task = self._network.io.spawn(trying, f"rpcdist try to reach {self.identity.name}")
                    return
                if limit.shortage is not None:
                    self._fail_waiting(f"{limit.shortage}. It could not connect to {self.identity.name!r} meanwhile")
            else:
                self._up(connection)
                return
            await asyncio.sleep(next(pauses))

    def _fail_waiting(self, reason: str) -> None:
        """Drops messages that need not be sent any more, and fails those that have waited too long."""
        since = time.monotonic() - ONE_WAY_IN_PEER_TIMEOUTS * self._timeout_s
        with self._lock:
            stale = [sent for _, _, sent, at in self._waiting if sent is not None and at < since and not sent.ended]
            self._waiting = [one for one in self._waiting if one[3] >= since and not (one[2] and one[2].ended)]
        for sent in stale:
            sent.on_not_sent(time.monotonic() - self.last_up, reason, is_lost=False)

    async def _try_now_and_then(self) -> None:
        """Notices when a worker that lives out of reach can be reached again, which no event reports."""
        num_silent = 0
        while num_silent < MAX_SILENT_LOOKS:
            await asyncio.sleep(self._timeout_s)
            if self.state != "lost":
                return
            if not self.has_inbound_session(self.identity):  # or this process was delayed, and has not read yet
                num_silent += 1
                continue
            num_silent = 0
            with suppress(TransportError):
                self._up(await self._open(self._timeout_s))
                return

    async def _open(self, timeout_s: float) -> Connection:
        """Opens the connection, in one attempt."""
        return await self._network.connect(
            self.address, ROLE, timeout_s, handler=self, expected=self.identity, retry=False
        )

    def _up(self, connection: Connection) -> None:
        with self._lock:
            if self.state == "closed":
                connection.session.close("closed at this end")
                return
            self._connection = connection
            self.state = "up"
            was_lost = self.lost_reason is not None
            self.lost_reason = None
            self.is_out_of_reach = False
            session = connection.session
            if (introduction := self.introduction(self.identity)) is not None:
                session.send(introduction)
            for control in self._control.to_resend():  # before anything new: the peer applies them in order
                session.send(control)
            is_large = any(buffers for _, buffers, _, _ in self._waiting)
        if was_lost:
            self._events.found.publish(self.identity)
        if is_large:  # sending copies it into shared memory, which must not block this loop
            with suppress(RpcdistError):  # the pool has ended
                self.submit(self._send_waiting, session)
                return
        self._send_waiting(session)

    def _send_waiting(self, session: Session) -> None:
        """Sends the messages that waited for the connection, and those queued meanwhile; any thread."""
        while (waiting := self._take_waiting(session)) is not None:
            for message, buffers, sent, _ in waiting:
                if sent is not None and sent.ended:
                    continue  # it was cancelled, or its deadline passed, before the connection was open
                try:
                    number = session.send(message, buffers)
                except Exception as exc:  # its tensors no longer exist; the other messages are still sent
                    if sent is None:
                        logger.exception("a message to %s could not be sent", self.identity.name)
                    else:
                        sent.on_not_sent(time.monotonic() - self.last_up, text_of(exc), is_lost=False)
                    continue
                if sent is not None:
                    sent.on_sent(session, number)
        if session.closed_reason is not None:  # it ended before this peer was its handler
            self._network.io.call_soon(self.on_closed, session, session.closed_reason)

    def _take_waiting(self, session: Session) -> list[_Waiting] | None:
        """The messages to send next; None if there are none, so that threads send on the session from now on."""
        with self._lock:
            if not self._is_up_by(session):
                return None  # waiting senders are notified, or wait for the next connection
            waiting, self._waiting = self._waiting, []
            if not waiting:
                self.session = session  # last: a thread that sees it may send at once, before messages that waited
            return waiting or None

    def _is_up_by(self, session: Session) -> bool:
        return self.state == "up" and self._connection is not None and self._connection.session is session

    def on_opened(self, session: Session) -> None:
        """Not called: this process opens the session itself."""

    def on_closed(self, session: Session, reason: str) -> None:
        with self._lock:
            if self.state == "closed":
                return
            reconnect = self._is_up_by(session)
            if reconnect:
                self.session = None
                self.last_up = session.last_received
                reconnect = not self._lifetime.is_ending or bool(self._waiting or len(self._control))
                self.state = "connecting" if reconnect else "idle"
        self._events.broken.publish(session, reason)  # also after `declare_lost`: calls wait on this session
        if reconnect:
            self._spawn_connect(reason, session.last_received)

    def _lose(self, reason: str, gone: bool) -> None:
        with self._lock:
            if self.state == "closed":
                return
            self.state = "lost"
            self.lost_reason = reason
            self.lost_at = time.monotonic()
            if self.session is not None:
                self.last_up = self.session.last_received
            self.is_gone = gone
            # Notified without the lock: their calls end, and a thread that waits for one may call this worker again.
            unsent = [(message, buffers, sent) for message, buffers, sent, _ in self._waiting if sent is not None]
            self._waiting.clear()
        self.on_lost(self, reason, unsent)

    def declare_lost(self, reason: str) -> None:
        """Ends the connection permanently, on evidence from elsewhere (a newer incarnation, the coordinator)."""
        if self.state not in ("lost", "closed"):
            self._lose(reason, gone=True)
        self._end(reason)

    def close(self, reason: str) -> None:
        """Ends the connection without declaring the worker lost; idempotent."""
        with self._lock:
            if self.state != "lost":
                self.state = "closed"
            self._waiting.clear()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._connection is not None:
            self._connection.session.close(reason)
        self.session = None
