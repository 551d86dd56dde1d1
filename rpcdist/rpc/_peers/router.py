"""Routes messages to workers by their ids: finds the connection to each worker, and opens one if there is none.

This worker's own id leads to the loopback. Every other id leads to the `Peer` of the process that has the id now; a
peer whose process was replaced, or was lost a while ago, is replaced by a new attempt.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import RpcdistError, TransportError, UnknownWorker, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._peers.control import ControlBody, ControlReceiver, kind_of
from rpcdist.rpc._peers.directory import Directory, PeerEvents
from rpcdist.rpc._peers.network import AnySession, Demultiplexer, Lifetime, Loopback, Network, SendObserver
from rpcdist.rpc._peers.peer import Peer, Unsent
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.time_limits import QUICK_ANSWER_LIMIT_S, THREAD_GRACE_S
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import TURNS_TO_READ, Session
from rpcdist.transport.wire_messages import WireMessage

logger = logging.getLogger(__name__)

REPLACED = "another process took its place"


@dataclass(eq=False, repr=False)
class Router:
    """Routes the messages of one agent. Any thread may use it, except for methods that run on the I/O loop.

    Args:
        find_next: waits until the successor of a lost coordinator is found, or until one attempt has failed.
        introduction: makes the first message of each connection to a worker, or None.
    """

    _network: Network
    _directory: Directory
    _demultiplexer: Demultiplexer
    _control: ControlReceiver
    _events: PeerEvents
    _lifetime: Lifetime
    _peer_timeout_s: float
    _find_next: Callable[[Deadline], Awaitable[object]]
    _introduction: Callable[[Identity], rpc_pb2.Message | None]
    _submit: Callable[..., object]
    _peers: dict[int, Peer] = field(default_factory=dict)
    # The last session that each worker has opened to this one.
    _inbound: dict[Identity, Session] = field(default_factory=dict)
    # Control messages to workers that are not known yet.
    _for_strangers: dict[int, list[ControlBody]] = field(default_factory=dict)
    # For making peers, and for kept messages; lookups of peers do not need it.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._me = self._directory.me.id
        self._loopback = Loopback(self._directory.me, self._demultiplexer.on_messages)
        self._events.opened.listen(self._on_opened)
        self._events.broken.listen(self._on_broken)
        self._events.replaced.listen(self._on_replaced)

    # ------------------------------------------------------------ sending

    def session_for_call(self, worker_id: int) -> Session | None:
        """The session on which a call to a worker is sent now, as for nearly every call; None: use `send_call`.

        This process may have stood still (SIGSTOP, or a held interpreter lock) for so long that its peers have declared
        it lost. Then their messages are read first, except on an event loop: the call waits for the next connection,
        and is not lost on the one that they have closed.
        """
        peer = self._peers.get(worker_id)
        session = None if peer is None else peer.session
        if peer is None or session is None or peer.identity != self._directory.member(worker_id).identity:
            return None
        if time.monotonic() - session.last_sent <= self._peer_timeout_s:
            return session
        if asyncio._get_running_loop() is None:
            with suppress(RpcdistError):  # the loop is stuck, but the call may be tried nevertheless
                self._network.run(_turns_of_the_loop(), THREAD_GRACE_S)
        return self.session_with(worker_id)

    def send_call(self, to: int, message: WireMessage, buffers: Sequence[LargeBuffer], observer: SendObserver) -> None:
        """Sends a call. If the worker is lost, asks the coordinator first which process has its place now. A call to a
        lost coordinator is kept while one attempt is made to find its successor.

        Raises:
            TransportError: the worker is lost, or this one shuts down.
        """
        if to == self._me:
            self._loopback.send(message, buffers)
            observer.on_sent(self._loopback, 0)
        else:
            peer = self._living_peer(to)
            try:
                peer.send(message, buffers, observer)
            except TransportError as exc:
                if not self._keep_for_next(to, observer):
                    raise
                kept = [(message, buffers, observer)]
                self._network.io.call_soon(self._spawn_delivery, kept, peer.identity, str(exc))

    def send(
        self, to: int, message: WireMessage, buffers: Sequence[LargeBuffer] = (), observer: SendObserver | None = None
    ) -> None:
        """Sends a message at most once, and never waits.

        Raises:
            TransportError, UnknownWorker: the worker is lost, or no worker has this id.
        """
        if to != self._me:
            self.peer(to).send(message, buffers, observer)
            return
        self._loopback.send(message, buffers)
        if observer is not None:
            observer.on_sent(self._loopback, 0)

    def send_if_alive(self, to: int, message: WireMessage) -> None:
        """Like `send`, for a message that matters only to a living worker; otherwise it is dropped."""
        try:
            self.send(to, message)
        except (TransportError, UnknownWorker) as exc:
            logger.debug("not sent to worker %s: %s", to, exc)

    def send_again(self, identity: Identity, message: WireMessage, observer: SendObserver) -> None:
        """Sends a message again, to the same process only; on the I/O loop. Raises `TransportError`."""
        peer = self._peers.get(identity.id)
        if peer is None or peer.identity != identity:
            raise TransportError(REPLACED)
        peer.send(message, (), observer)

    def send_control(self, to: int, body: ControlBody) -> None:
        """Sends a control message until it is acknowledged, unless the worker dies; never waits."""
        if to == self._me:
            self._control.apply(kind_of(body), self._directory.me, body)
        elif self._lifetime.is_closed:
            return
        elif self._is_kept_for_stranger(to, body):
            io = self._network.io
            io.call_soon(lambda: io.spawn(self._send_to_stranger(to), "rpcdist control message to a stranger"))
        else:
            self.peer(to).send_control(body)

    def _is_kept_for_stranger(self, to: int, body: ControlBody) -> bool:
        """Keeps a control message to a worker that is not known here; the worker gets it before any other message."""
        if self._directory.knows(to):
            return False
        with self._lock:
            if self._directory.knows(to):
                return False
            self._for_strangers.setdefault(to, []).append(body)
            return True

    async def _send_to_stranger(self, to: int) -> None:
        """Sends kept messages: a reference may come from a worker that joined after this one last got the members."""
        await self._directory.refresh_async()
        if self._directory.knows(to):
            peer = self.peer(to)
            with self._lock:
                self._introduce(peer)
        elif self._for_strangers.pop(to, None):
            unknown = Identity(f"worker {to}", to, 0)
            lost = WorkerLost(unknown.name, "a remote reference", 0.0, "it is not a member of the job")
            self._events.lost.publish(unknown, lost)

    # ------------------------------------------------------------ peers

    def session_with(self, worker_id: int) -> Session | None:
        """The open session on which a message to a worker would be sent now, or None."""
        peer = self._peers.get(worker_id)
        return peer.session if peer is not None else None

    def standing_session(self, worker_id: int) -> Session | None:
        """Like `session_with`, but None if another process has the worker's place now."""
        peer = self._peers.get(worker_id)
        if peer is None or peer.session is None or not self._directory.knows(worker_id):
            return None
        if peer.identity != self._directory.member(worker_id).identity:
            return None
        return peer.session

    def flush(self, worker_id: int) -> None:
        session = self.session_with(worker_id)
        if session is not None:
            session.flush()

    def peer(self, worker_id: int) -> Peer:
        """The connection to another worker; a new one if it was replaced, a new attempt if it was lost a while ago."""
        peer = self._peers.get(worker_id)
        member = self._directory.member(worker_id)
        if peer is not None and peer.identity == member.identity and peer.state != "lost":
            return peer
        with self._lock:
            peer = self._peers.get(worker_id)  # another thread may have made it meanwhile
            if peer is not None and peer.identity == member.identity:
                # Not at every call: each attempt to reach a dead worker would delay its caller for a while.
                if time.monotonic() - peer.lost_at > self._peer_timeout_s:
                    peer.revive()
                return peer
            if peer is not None:  # on the loop: its listeners must not run under our lock
                self._network.io.call_soon(peer.declare_lost, REPLACED)
            peer = Peer(
                self._network,
                member,
                self._demultiplexer,
                self._events,
                self._lifetime,
                self._peer_timeout_s,
                introduction=self._introduction,
                has_inbound_session=self.has_inbound_session,
                submit=self._submit,
                on_lost=self._on_peer_lost,
            )
            self._introduce(peer)  # before any other message: a share is announced before its value is requested
            self._peers[worker_id] = peer
            return peer

    def _introduce(self, peer: Peer) -> None:
        """Sends a peer the messages that were kept for it; with the lock."""
        for body in self._for_strangers.pop(peer.identity.id, ()):
            peer.send_control(body)

    def _living_peer(self, worker_id: int) -> Peer:
        """Like `peer`, but asks first which process has the place of a lost worker."""
        self.learn_if_lost(worker_id)
        return self.peer(worker_id)

    def learn_if_lost(self, worker_id: int) -> None:
        """Asks the coordinator which process has the place of a worker now, if the worker is lost; bounded.

        On an event loop, which must not block, it asks in the background, for the next call. A coordinator that is lost
        itself, or was not heard from lately, is not asked, since the caller must fail fast.
        """
        peer = self._peers.get(worker_id)
        if peer is None or peer.state != "lost" or not self._hears_from_coordinator():
            return
        if peer.identity != self._directory.member(worker_id).identity:
            return  # the new process is known already
        if asyncio._get_running_loop() is not None:
            self._directory.refresh_soon()
            return
        try:
            self._directory.refresh(QUICK_ANSWER_LIMIT_S)
        except RpcdistError as exc:
            logger.debug("the coordinator did not send the list of workers: %s", exc)

    def _hears_from_coordinator(self) -> bool:
        """Whether the coordinator has lately shown, at least by a heartbeat, that it lives; True at the coordinator."""
        if self._me == self._directory.coordinator:
            return True
        coordinator = self._directory.coordinator
        if not self._directory.is_living(coordinator):
            return False
        peer, identity = self._peers.get(coordinator), self._directory.member(coordinator).identity
        sessions = [self._inbound.get(identity), peer.session if peer is not None else None]
        since = time.monotonic() - self._peer_timeout_s / 2
        return any(one is not None and one.closed_reason is None and one.last_received > since for one in sessions)

    def is_reachable(self, worker_id: int) -> bool:
        """Whether a worker lives, as far as this process knows; False for a coordinator that may be lost."""
        if worker_id == self._directory.coordinator:
            return not self.coordinator_may_be_lost()
        return self._directory.is_living(worker_id)

    def coordinator_may_be_lost(self) -> bool:
        """Whether the coordinator is lost, or may be."""
        if not self._directory.is_living(self._directory.coordinator):
            return True
        peer = self._peers.get(self._directory.coordinator)
        return (peer is None or peer.session is None) and self._me != self._directory.coordinator

    def find_coordinator(self, deadline: Deadline) -> None:
        """Waits until it is clear whether the coordinator lives, and if not, for one attempt to find its successor; not
        on an event loop, which must not block.

        References and shares in autograd contexts that are made afterwards then go to the successor.
        """
        if asyncio._get_running_loop() is None:
            self._network.run(self._find_coordinator(deadline), None)

    async def _find_coordinator(self, deadline: Deadline) -> None:
        await self.peer(self._directory.coordinator).settled(min(QUICK_ANSWER_LIMIT_S, deadline.remaining_s()))
        if not self._directory.is_living(self._directory.coordinator):
            await self._find_next(deadline)

    def _keep_for_next(self, to: int, observer: SendObserver) -> bool:
        return to == self._directory.coordinator and observer.retry_until is not None and not self._lifetime.is_closed

    def _spawn_delivery(self, kept: Sequence[Unsent], lost: Identity, reason: str) -> None:
        self._network.io.spawn(self._deliver_to_next(kept, lost, reason), "rpcdist calls to the next coordinator")

    async def _deliver_to_next(self, kept: Sequence[Unsent], lost: Identity, reason: str) -> None:
        """Sends calls that the lost coordinator has not received to its successor, which may be known already."""
        if self._directory.member(self._directory.coordinator).identity == lost:
            limits = [limit for _, _, sent in kept if (limit := sent.retry_until) is not None]
            await self._find_next(max(limits, key=lambda limit: limit.at))
        for message, buffers, sent in kept:
            if sent.ended:
                continue  # its deadline passed meanwhile, or it was cancelled
            try:
                if self._directory.member(self._directory.coordinator).identity == lost:
                    raise TransportError(reason)
                self.send(self._directory.coordinator, message, buffers, sent)
            except TransportError as exc:
                sent.on_not_sent(self.silence_s(self._directory.coordinator), str(exc))

    def reach(self, worker_id: int, is_lost: Callable[[], bool], deadline: Deadline) -> None:
        """Tries again to reach a worker that was declared lost, as a call does; waits until it is found, or lost again.

        On an event loop, which must not block, it only starts the attempt.
        """
        if worker_id == self._directory.coordinator:
            self.find_coordinator(deadline)
        peer = self._living_peer(worker_id)
        if asyncio._get_running_loop() is None:
            given_up = ("lost", "closed")
            self._directory.wait_while(lambda: is_lost() and peer.state not in given_up, deadline)

    def revive(self, worker_id: int) -> None:
        peer = self._peers.get(worker_id)
        if peer is not None:
            peer.revive()

    def watch(self, worker_id: int, what: str = "a connection") -> WorkerLost | None:
        """Connects to another worker, so that its death is noticed here.

        Returns:
            The error, if the worker is already lost.
        """
        peer = self.peer(worker_id)
        if peer.state == "lost":
            silence_s = time.monotonic() - peer.last_up
            return WorkerLost(peer.identity.name, what, silence_s, peer.lost_reason or "unknown")
        peer.connect()
        return None

    def silence_s(self, worker_id: int) -> float:
        """Seconds since a worker was last known to live."""
        peer = self._peers.get(worker_id)
        return self._silence_of(peer) if peer is not None else 0.0

    def _silence_of(self, peer: Peer) -> float:
        inbound = self._inbound.get(peer.identity)
        last_seen = peer.last_up if inbound is None else max(peer.last_up, inbound.last_received)
        return time.monotonic() - last_seen

    def sessions(self) -> list[Session]:
        return [peer.session for peer in list(self._peers.values()) if peer.session is not None]

    # ------------------------------------------------------------ I/O loop

    def has_inbound_session(self, identity: Identity) -> bool:
        """Whether the worker has a connection of its own to this one, on which it shows that it lives."""
        session = self._inbound.get(identity)
        return (
            session is not None
            and session.closed_reason is None
            and time.monotonic() - session.last_received < self._peer_timeout_s
        )

    def silence_out_of_reach(self, identity: Identity) -> float | None:
        """Seconds since a worker was heard from that is lost here although it lives; None for other workers."""
        peer = self._peers.get(identity.id)
        if peer is None or peer.identity != identity or not peer.is_out_of_reach:
            return None
        return self._silence_of(peer) if self.has_inbound_session(identity) else None

    def _on_peer_lost(self, peer: Peer, reason: str, unsent: Sequence[Unsent]) -> None:
        silence_s = self._silence_of(peer)
        # Listeners first: a caller whose call was not sent then finds the worker's references lost, too.
        self._events.lost.publish(peer.identity, WorkerLost(peer.identity.name, "a connection", silence_s, reason))
        kept = []
        for one in unsent:
            observer = one[2]
            if self._keep_for_next(peer.identity.id, observer):
                kept.append(one)
            else:
                observer.on_not_sent(silence_s, reason)
        if kept:
            self._spawn_delivery(kept, peer.identity, reason)

    def on_acknowledgement(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        peer = self._peers.get(session.peer.id)
        if peer is not None and peer.identity == session.peer:  # the numbers of its predecessor are meaningless here
            peer.acknowledged(message.ack.control_seq)

    def _on_broken(self, session: AnySession, reason: str) -> None:
        if self._inbound.get(session.peer) is session:
            del self._inbound[session.peer]

    def _on_opened(self, session: Session) -> None:
        self._inbound[session.peer] = session
        peer = self._peers.get(session.peer.id)
        if peer is not None and peer.identity == session.peer:
            peer.revive()  # it lives after all
        self._events.found.publish(session.peer)
        if self._directory.is_news(session.peer):
            self._directory.refresh_soon()

    def _on_replaced(self, identity: Identity) -> None:
        peer = self._peers.get(identity.id)
        if peer is not None and peer.identity == identity:
            peer.declare_lost(REPLACED)

    def close(self, reason: str) -> None:
        for peer in self._peers.values():
            peer.close(reason)


async def _turns_of_the_loop() -> None:
    for _ in range(TURNS_TO_READ):
        await asyncio.sleep(0)
