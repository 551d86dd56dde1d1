"""The connections of an agent: its own to other workers, theirs to it, and what their ends mean."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rpcdist._proto import autograd_pb2, rpc_pb2, rref_pb2
from rpcdist.errors import RpcdistError, TransportError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._calling.call_table import PendingCall
from rpcdist.rpc._peers.control import ControlInbox
from rpcdist.rpc._peers.leases import Leases
from rpcdist.rpc._peers.network import MessageSink, SendObserver
from rpcdist.rpc._peers.peer import Peer, PeerState
from rpcdist.rpc._values import ReceiveBuffer
from rpcdist.time_limits import ACKNOWLEDGE_DELAY_S, LEASE_IN_PEER_TIMEOUTS
from rpcdist.transport import Session

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent, AnySession

__all__ = ["Connections"]

logger = logging.getLogger(__name__)

REPLACED = "another process took its place"


class Connections:
    """One per agent; the taker of all its sessions. `on_*` run on the I/O loop, the rest on any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._inboxes: dict[tuple[int, int], ControlInbox] = {}
        self._to_acknowledge: dict[AnySession, int] = {}  # I/O loop
        self._leases = Leases(LEASE_IN_PEER_TIMEOUTS * agent.options.peer_timeout)
        self.loss_listeners: list[Callable[[Identity, WorkerLost], None]] = []

    def __repr__(self) -> str:
        return f"<Connections [{len(self._peers)} out, {len(self._sessions)} in]>"

    # ------------------------------------------------------------ out

    def peer(self, worker_id: int) -> Peer:
        """The connection to another worker; a new one if it was replaced, a new attempt if it was lost a while ago."""
        peer = self._peers.get(worker_id)
        member = self._agent.directory.member(worker_id)
        if peer is not None and peer.identity == member.identity and peer.state is not PeerState.LOST:
            return peer
        with self._lock:
            peer = self._peers.get(worker_id)
            if peer is not None and peer.identity == member.identity:
                if self._may_try_again(peer):
                    peer.revive()
                return peer
            if peer is not None:
                self._agent.node.io.call_soon(peer.declare_lost, REPLACED)
            peer = Peer(self._agent.node, member.identity, member.address, self, self._agent.options.peer_timeout)
            self._peers[worker_id] = peer
            return peer

    def living_peer(self, worker_id: int) -> Peer:
        """As `peer`; asks the coordinator whether a worker that is lost has been replaced. May block, bounded."""
        peer = self.peer(worker_id)
        if peer.state is PeerState.LOST and asyncio._get_running_loop() is None:
            try:
                self._agent.directory.refresh()
            except RpcdistError as exc:
                logger.debug("the coordinator did not say who is in the job: %s", exc)
            peer = self.peer(worker_id)
        return peer

    def _may_try_again(self, peer: Peer) -> bool:
        return time.monotonic() - peer.lost_at > self._agent.options.peer_timeout

    def watch(self, identity: Identity) -> None:
        """Connects to a worker, so that its death is noticed here."""
        if self._agent.directory.is_news(identity):
            self._agent.directory.refresh()
        self.peer(identity.id).connect()

    def silence_s(self, worker_id: int) -> float:
        """Seconds since the connection to a worker was last known to be good."""
        peer = self._peers.get(worker_id)
        return time.monotonic() - peer.last_up if peer is not None else 0.0

    def send_to(self, worker_id: int, message: rpc_pb2.Message) -> None:
        """Sends a message about a call that was made from here; dropped when the worker is gone."""
        try:
            if worker_id == self._agent.worker_id:
                self._agent.loopback.send(message)
            else:
                self.peer(worker_id).send(message)
        except TransportError as exc:
            logger.debug("not sent to worker %s: %s", worker_id, exc)

    # ------------------------------------------------------------ sessions (I/O loop)

    def allocate(self, size_bytes: int) -> ReceiveBuffer:
        return ReceiveBuffer.allocate(size_bytes)

    def borrow(self, view: memoryview) -> ReceiveBuffer:
        return ReceiveBuffer.borrowed(view)

    @property
    def shares_payloads(self) -> bool:
        return self._agent.options.share_payloads

    def on_messages(self, session: AnySession, messages: list[tuple[rpc_pb2.Message, list[Any]]]) -> None:
        self._agent.on_messages(session, messages)

    def acknowledged(self, session: AnySession, control_seq: int) -> None:
        """A worker has applied our control messages up to this one."""
        peer = self._peers.get(session.peer.id)
        if peer is not None and peer.identity == session.peer:
            peer.acknowledged(control_seq)

    def take_control(self, session: AnySession, message: rpc_pb2.Message) -> None:
        """Applies a control message, unless that was done before; it is acknowledged soon, with those that follow."""
        peer = session.peer
        inbox = self._inboxes.setdefault((peer.id, peer.incarnation), ControlInbox())
        if inbox.accept(message.control_seq):
            if message.HasField("rref"):
                self._agent.rrefs.on_message(peer.id, peer.incarnation, message.rref)
            elif message.HasField("autograd") and self._agent.autograd is not None:
                self._agent.autograd.on_message(peer, message.autograd, ())
        if not self._to_acknowledge:
            self._agent.node.io.loop.call_later(ACKNOWLEDGE_DELAY_S, self._acknowledge)
        self._to_acknowledge[session] = inbox.applied

    def _acknowledge(self) -> None:
        owed, self._to_acknowledge = self._to_acknowledge, {}
        for session, applied in owed.items():
            session.send(rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=applied)))

    def refusal(self, identity: Identity) -> str | None:
        """Why a worker may not connect, or None."""
        if not self._agent.directory.was_replaced(identity):
            return None
        return (
            f"worker {identity.name!r} was given up while it did not answer, and {REPLACED}; this one is out of the "
            "job and can only end: rpc.shutdown(graceful=False)"
        )

    def on_opened(self, session: Session) -> None:
        """A worker connected to us."""
        self._sessions.add(session)
        self._leases.seen(session.peer)
        peer = self._peers.get(session.peer.id)
        if peer is not None and peer.identity == session.peer:
            peer.revive()  # it lives after all
        if self._agent.directory.is_news(session.peer):
            self.learn_soon()

    def learn_soon(self) -> None:
        """Asks the coordinator who is there; any thread."""
        self._agent.node.io.call_soon(self._spawn_learn)

    def _spawn_learn(self) -> None:
        self._agent.node.io.spawn(self._learn(), "rpcdist learn who is there")

    def send_control(self, to: int, message: rref_pb2.RRefMessage | autograd_pb2.AutogradMessage) -> None:
        """Sends a control message reliably; any thread, never blocks."""
        if self._agent.directory.knows(to):
            self.peer(to).send_control(message)
        else:
            self._agent.node.io.call_soon(self._spawn_introduction, to, message)

    def _spawn_introduction(self, to: int, message: rref_pb2.RRefMessage | autograd_pb2.AutogradMessage) -> None:
        self._agent.node.io.spawn(self._send_to_stranger(to, message), "rpcdist control message to a stranger")

    async def _send_to_stranger(self, to: int, message: rref_pb2.RRefMessage | autograd_pb2.AutogradMessage) -> None:
        await self._learn()
        if self._agent.directory.knows(to):
            self.peer(to).send_control(message)
        else:
            lost = WorkerLost(f"worker {to}", "a remote reference", 0.0, "it is not a member of the job")
            self._agent.rrefs.worker_lost(to, lost)

    async def _learn(self) -> None:
        """Asks the coordinator who a stranger, or a known worker in a new incarnation, is."""
        assert self._agent.membership is not None  # set before anybody can connect
        try:
            self._agent.directory.update(await self._agent.membership.members_async())
        except RpcdistError as exc:
            logger.warning("the coordinator did not say who is in the job: %s", exc)

    def on_replaced(self, identity: Identity) -> None:
        """Another process has the place of a worker; any thread."""
        self._agent.node.io.call_soon(self._forget_incarnation, identity)

    def _forget_incarnation(self, identity: Identity) -> None:
        peer = self._peers.get(identity.id)
        if peer is not None and peer.identity == identity:
            peer.declare_lost(REPLACED)
        for session in list(self._sessions):
            if session.peer == identity:
                session.close(REPLACED)
        lost = WorkerLost(identity.name, "a connection", 0.0, REPLACED)
        self._agent.rrefs.worker_lost(identity.id, lost, identity.incarnation)

    def on_closed(self, session: Session, reason: str) -> None:
        """A worker's connection to us ended; it may come back, and its lease says until when."""
        self._sessions.discard(session)
        self._tell_autograd(session.peer, _lost(session, reason, "a backward pass"))
        self._leases.seen(session.peer)
        self._agent.dispatcher.session_ended(session)
        self._shares_uncertain(session.peer)

    def on_peer_broken(self, peer: Peer, session: Session, reason: str) -> None:
        """Our connection to a worker ended: what was sent on it will not be answered."""
        self._tell_autograd(peer.identity, _lost(session, reason, "a backward pass"))
        self._leases.seen(peer.identity)
        for call in self._agent.caller.calls:
            if call.session is session:
                self.on_unanswered(call, session, reason)
        self._agent.streams.fail_where(lambda _, on: on is session, partial(_lost, session, reason))
        self._shares_uncertain(peer.identity)

    def on_unanswered(self, call: PendingCall, session: MessageSink, reason: str) -> None:
        """The session of a call has ended: the call fails, unless it may be repeated. Any thread."""
        if call.repeatable is None:
            self._agent.caller.end(call, _lost(session, reason, call.what()))
        else:
            self._agent.node.io.call_soon(self._send_again, call, session, reason)

    def _send_again(self, call: PendingCall, session: MessageSink, reason: str) -> None:
        if call.ended or call.session is not session or call.repeatable is None:
            return
        call.session = None
        peer = self._peers.get(call.peer)
        try:
            if peer is None or peer.identity != session.peer:
                raise TransportError(REPLACED)
            peer.send(call.repeatable, (), call)
        except TransportError as exc:
            self._agent.caller.end(call, _lost(session, f"{reason}; {exc}", call.what()))

    def on_peer_lost(self, peer: Peer, reason: str, unsent: Sequence[SendObserver]) -> None:
        """A worker is declared dead."""
        silence = time.monotonic() - peer.last_up
        exc = WorkerLost(peer.identity.name, "a connection", silence, reason)
        self._leases.seen(peer.identity)  # it may hold shares although it was never connected
        self._agent.rrefs.worker_lost(peer.identity.id, exc, peer.identity.incarnation)
        self._tell_autograd(peer.identity, WorkerLost(peer.identity.name, "a backward pass", silence, reason))
        if self._agent.autograd is not None:
            self._agent.autograd.worker_dead(peer.identity)
        for call in unsent:
            call.on_not_sent(silence, reason)
        membership = self._agent.membership
        if membership is not None and membership.service is not None:
            membership.service.lost(peer.identity)
        for listener in list(self.loss_listeners):
            listener(peer.identity, exc)

    def _tell_autograd(self, identity: Identity, exc: WorkerLost) -> None:
        if self._agent.autograd is not None and not self._agent.closed:
            self._agent.autograd.worker_lost(identity, exc)

    def _shares_uncertain(self, identity: Identity) -> None:
        if not self._agent.closed and self._agent.directory.knows(identity.id):
            calls = self._agent.caller.calls
            on_the_way = [fork for call in calls if call.peer == identity.id for fork in call.forks or ()]
            self._agent.rrefs.connection_broken(identity.id, on_the_way)

    def renew_leases(self) -> None:
        for session in self._sessions:
            self._leases.seen(session.peer, session.last_received)
        for peer in list(self._peers.values()):
            if peer.session is not None:
                self._leases.seen(peer.identity, peer.session.last_received)
        for identity in self._leases.take_ended():
            logger.info("the lease of worker %s ended", identity.name)
            self._agent.rrefs.lease_ended(identity.id, identity.incarnation)

    # ------------------------------------------------------------ the end (I/O loop)

    async def flush(self, timeout_s: float, wait_for_others: bool) -> None:
        """Waits until what was queued is written, and perhaps until the others have left, for they wait for it."""
        self._acknowledge()
        peers = [peer.session for peer in self._peers.values() if peer.session is not None]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(session.drain(timeout_s) for session in [*peers, *self._sessions]))
                if wait_for_others:
                    await asyncio.gather(*(session.ended(timeout_s) for session in list(self._sessions)))
        except TimeoutError:
            logger.debug("not everything was written within %s s", timeout_s)

    def close(self, reason: str) -> None:
        """Ends all of them at once."""
        for peer in self._peers.values():
            peer.close(reason)
        for session in list(self._sessions):
            session.close(reason)


def _lost(session: MessageSink, reason: str, what: str) -> WorkerLost:
    return WorkerLost(session.peer.name, what, time.monotonic() - session.last_received, reason)
