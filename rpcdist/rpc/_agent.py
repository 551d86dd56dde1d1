"""The agent: one per process, it owns everything that RPC uses, and routes what arrives.

Threads: public functions run on the caller's thread; `on_*` run on the I/O loop and never run user code there; user code
runs in the pool and on the user loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rpcdist._proto import rpc_pb2, rref_pb2, value_pb2
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import BlockingInLoop, Cancelled, RpcdistError, TransportError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._arrived import Arrived, OutgoingRRefs
from rpcdist.rpc._calls import CallTable, Completer, PendingCall
from rpcdist.rpc._completers import FutureCompleter, Job, SyncCompleter
from rpcdist.rpc._control import ControlInbox
from rpcdist.rpc._dispatch import Dispatcher
from rpcdist.rpc._functions import encode_function, unwrap
from rpcdist.rpc._gather import Gatherings, Leader
from rpcdist.rpc._gil import GilWait
from rpcdist.rpc._leases import Leases
from rpcdist.rpc._loopback import Loopback
from rpcdist.rpc._members import Directory
from rpcdist.rpc._peer import Peer, PeerState
from rpcdist.rpc._pool import WorkerPool
from rpcdist.rpc._rref.identifiers import UniqueId
from rpcdist.rpc._rref.manager import RRefManager
from rpcdist.rpc._rref.wire import id_to_pb
from rpcdist.rpc._streams import StreamTable
from rpcdist.rpc._user_loop import UserLoop
from rpcdist.rpc._values import LargeBuffer, ReceiveBuffer, encode_into
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future
from rpcdist.rpc.options import RpcOptions
from rpcdist.rpc.rref import PyRRef
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.transport import Node, Session

if TYPE_CHECKING:
    from rpcdist.collectives import Store
    from rpcdist.rpc._interrupt import InterruptWatch
    from rpcdist.rpc._coordinator import Coordinator

__all__ = ["ROLE", "Agent", "AnySession", "Destination"]

logger = logging.getLogger(__name__)

ROLE = "rpc"
RREF_SERVICE = rref_pb2.DESCRIPTOR.services_by_name["RRef"]
TICK_S = 0.1
CLOSE_LIMIT_S = 5.0
LEASE_IN_PEER_TIMEOUTS = 3

AnySession = Session | Loopback
Destination = str | int | WorkerInfo


class Agent:
    """See the module. `start_agent` makes it, `shutdown` ends it.

    Args:
        node: the transport; the agent holds one share of it.
        directory: who is in the job.
        options: the options of `init_rpc`.
        world_size: None where workers come and go.
    """

    def __init__(self, node: Node, directory: Directory, options: RpcOptions, world_size: int | None) -> None:
        self.node = node
        self.directory = directory
        self.options = options
        self.world_size = world_size
        self.identity: Identity = directory.me
        self.worker_id = self.identity.id
        self.worker_name = self.identity.name
        self.incarnation = self.identity.incarnation
        self.rpc_timeout_s = options.rpc_timeout
        self.pool = WorkerPool(max_threads=options.max_worker_threads)
        self.user_loop = UserLoop()
        self.rrefs = RRefManager(self)
        self.calls = CallTable(self._wake_at)
        self.streams = StreamTable(self)
        self.dispatcher = Dispatcher(self)
        self.closed = False
        self._loopback = Loopback(self.identity, self.allocate, self._on_loopback)
        self._peers: dict[int, Peer] = {}
        self._peers_lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._inboxes: dict[tuple[int, int], ControlInbox] = {}
        self._leases = Leases(LEASE_IN_PEER_TIMEOUTS * options.peer_timeout)
        self._timer: asyncio.TimerHandle | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self.loss_listeners: list[Callable[[Identity, WorkerLost], None]] = []
        self.gil_profiling = False
        self.gil_wait = GilWait()
        self.membership: Coordinator | None = None
        self.interrupts: InterruptWatch | None = None
        self.store: Store | None = None
        self.gatherings = Gatherings()
        self.leader = Leader(self)

    def __repr__(self) -> str:
        return f"<Agent {self.worker_name} ({self.worker_id}) [{len(self.calls)} calls out, {len(self.dispatcher)} in]>"

    def start(self) -> None:
        """Opens for business; any thread but the loop's."""
        self.user_loop.start()
        self.node.add_service(RREF_SERVICE, {"Deliver": self._deliver_rref})
        self.node.handle_role(ROLE, self)
        self.node.io.call_soon(self._tick)

    # ------------------------------------------------------------ who is who

    def worker_name_of(self, worker_id: int) -> str:
        return self.directory.name_of(worker_id)

    def incarnation_of(self, worker_id: int) -> int:
        return self.directory.incarnation_of(worker_id)

    def resolve(self, to: Destination) -> int:
        """The id of a destination. Raises `UnknownWorker`, `TypeError`."""
        return self.directory.resolve(to)

    def peer(self, worker_id: int) -> Peer:
        """The connection to another worker; a new one if the worker was replaced or was lost a while ago."""
        peer = self._peers.get(worker_id)
        member = self.directory.member(worker_id)
        if peer is not None and peer.identity == member.identity and peer.state is not PeerState.LOST:
            return peer
        with self._peers_lock:
            peer = self._peers.get(worker_id)
            if peer is not None and peer.identity == member.identity:
                if peer.state is not PeerState.LOST or not self._may_try_again(peer):
                    return peer
            elif peer is not None:
                self.node.io.call_soon(peer.declare_lost, "another process took its place")
            peer = Peer(self.node, member.identity, member.address, self, self.options.peer_timeout)
            self._peers[worker_id] = peer
            return peer

    def _living_peer(self, worker_id: int) -> Peer:
        """As `peer`; asks the coordinator whether a worker that is lost has been replaced. May block, bounded."""
        peer = self.peer(worker_id)
        if peer.state is PeerState.LOST and asyncio._get_running_loop() is None:
            try:
                self.directory.refresh()
            except RpcdistError as exc:
                logger.debug("the coordinator did not say who is in the job: %s", exc)
            peer = self.peer(worker_id)
        return peer

    def _may_try_again(self, peer: Peer) -> bool:
        return time.monotonic() - peer.lost_at > self.options.peer_timeout

    # ------------------------------------------------------------ outgoing calls

    def timeout_of(self, timeout_s: float) -> float:
        """The user's timeout with torch's conventions (-1: the default, 0: none) as seconds, infinity for none."""
        if timeout_s == UNSET_RPC_TIMEOUT:
            timeout_s = self.rpc_timeout_s
        return float("inf") if timeout_s == 0 else timeout_s

    def call_sync(self, to: Destination, func: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> Any:
        if asyncio._get_running_loop() is not None:
            raise BlockingInLoop("rpc_sync")
        completer = SyncCompleter(self.options.allow_pickle)
        call = self._call(self.resolve(to), func, args, kwargs, timeout_s, completer)
        return completer.wait(call, self)

    def call_async(
        self, to: Destination, func: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float
    ) -> Future[Any]:
        future: Future[Any] = Future()
        call = self._call(self.resolve(to), func, args, kwargs, timeout_s, FutureCompleter(self, future))
        future._on_cancel = lambda: self.cancel_call(call, None)
        return future

    def call_remote(
        self, to: int, fork: value_pb2.RRefFork, func: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float
    ) -> Future[Any]:
        """Asks a worker to run a function and keep its result under the ids in `fork`."""
        future: Future[Any] = Future()
        self._call(to, func, args, kwargs, timeout_s, FutureCompleter(self, future), result=fork)
        return future

    def fetch(self, owner: int, rref: UniqueId, fork: UniqueId, timeout_s: float) -> Future[Any]:
        """The value of a remote reference, from its owner."""
        future: Future[Any] = Future()
        message = rpc_pb2.Message()
        target = message.call.fetch
        target.rref.CopyFrom(id_to_pb(rref))
        target.fork.CopyFrom(id_to_pb(fork))
        call = self._send_call(
            owner,
            message,
            (),
            timeout_s,
            self._deadline(timeout_s),
            FutureCompleter(self, future),
            lambda: f"to_here() of {rref}",
        )
        future._on_cancel = lambda: self.cancel_call(call, None)
        return future

    def _call(
        self,
        to: int,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        timeout_s: float,
        completer: Completer,
        result: value_pb2.RRefFork | None = None,
    ) -> PendingCall:
        if not callable(func):
            raise TypeError("function should be callable.")
        deadline = self._deadline(timeout_s)  # before encoding, which may run slow user code
        message = rpc_pb2.Message()
        call = message.call
        func, args, kwargs = unwrap(func, tuple(args) if args else (), kwargs or {})
        name = encode_function(func, by_value=self.options.by_value)
        if isinstance(name, str):
            call.function = name
        else:
            call.function_pickle = name
        large, forks = self.encode_for(call.arguments, (args, kwargs), to)
        if result is not None:
            call.result.CopyFrom(result)

        def what() -> str:
            called = name if isinstance(name, str) else getattr(func, "__qualname__", repr(func))
            return f"rpc to {self.worker_name_of(to)!r} of {called}"

        return self._send_call(to, message, large, timeout_s, deadline, completer, what, forks)

    def _deadline(self, timeout_s: float) -> Deadline:
        return Deadline.after(self.timeout_of(timeout_s)).earlier(current_deadline.get())

    def _send_call(
        self,
        to: int,
        message: rpc_pb2.Message,
        large: Sequence[LargeBuffer],
        timeout_s: float,
        deadline: Deadline,
        completer: Completer,
        what: Callable[[], str],
        forks: list[value_pb2.RRefFork] | None = None,
    ) -> PendingCall:
        if self.closed:
            raise RpcdistError("RPC is shutting down in this process")
        call = PendingCall(self, self.calls.next_id(), to, what, deadline, self.timeout_of(timeout_s), completer)
        message.call.id = call.id
        if deadline.is_finite:
            message.call.timeout_us = max(1, int(deadline.remaining_s() * 1e6))
        call.forks = forks or None
        self.calls.add(call)
        try:
            if to == self.worker_id:
                call.session = self._loopback
                self._loopback.send(message, large)
            else:
                self._living_peer(to).send(message, large, call)
        except TransportError as exc:
            self.end_call(call, WorkerLost(self.worker_name_of(to), what(), self._silence_s(to), str(exc)))
        except BaseException:
            self.calls.take(call.id)
            self.give_back(forks, to)
            raise
        return call

    def end_call(self, call: PendingCall, exc: BaseException) -> None:
        """Fails a call, unless it has ended; any thread."""
        if self.calls.take(call.id) is not None:
            self.give_back(call.forks, call.peer)
            call.completer.failed(exc)

    def cancel_call(self, call: PendingCall, exc: BaseException | None) -> bool:
        """Ends a call and tells the callee; False if it has ended already.

        Args:
            call: the call.
            exc: what it fails with; None where the caller completes its own side.
        """
        if self.calls.take(call.id) is None:
            return False
        session = call.session
        if isinstance(session, Session) and call.transfer:
            session.abort_transfer(call.transfer, "the call was cancelled")
        if session is not None:
            session.send(rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=call.id)))  # type: ignore[attr-defined]
        self.give_back(call.forks, call.peer)
        if exc is not None:
            call.completer.failed(exc)
        return True

    def interrupt(self) -> None:
        """Ends every call in flight, for Ctrl-C: waits inside torch's C++ do not notice signals."""
        for call in self.calls:
            self.cancel_call(call, Cancelled(f"{call.what()} was interrupted by Ctrl-C"))

    def _silence_s(self, worker_id: int) -> float:
        peer = self._peers.get(worker_id)
        return time.monotonic() - peer.last_up if peer is not None else 0.0

    # ------------------------------------------------------------ values and replies

    def encode_for(
        self, value: value_pb2.Value, obj: object, to: int
    ) -> tuple[list[LargeBuffer], list[value_pb2.RRefFork]]:
        """Encodes for a worker; remote references inside are shared with it."""
        externals = OutgoingRRefs(self.rrefs, PyRRef, to, value)
        try:
            large = encode_into(
                value, obj, externals, by_value=self.options.by_value, map_device=self.directory.device_map(to)
            )
        except BaseException:
            self.give_back(externals.forks, to)
            raise
        return large, externals.forks

    def give_back(self, forks: Sequence[object] | None, to: int) -> None:
        """Undoes shares whose message may not have arrived."""
        for fork in forks or ():
            self.rrefs.share_failed(fork, to)  # type: ignore[arg-type]

    def send_reply(
        self,
        session: AnySession,
        message: rpc_pb2.Message,
        large: Sequence[LargeBuffer],
        forks: list[value_pb2.RRefFork],
    ) -> None:
        session.send(message, large)
        if forks and session.closed_reason is not None:
            self.give_back(forks, session.peer.id)

    def send_to(self, worker_id: int, message: rpc_pb2.Message) -> None:
        """Sends a message about a call that was made from here; dropped when the worker is gone."""
        try:
            if worker_id == self.worker_id:
                self._loopback.send(message)
            else:
                self.peer(worker_id).send(message)
        except TransportError as exc:
            logger.debug("not sent to worker %s: %s", worker_id, exc)

    def send_control(self, to: int, message: rref_pb2.RRefMessage) -> None:
        """Sends a control message reliably; any thread, never blocks."""
        if to == self.worker_id:
            self.rrefs.on_message(self.worker_id, self.incarnation, message)
        elif not self.closed and self.directory.knows(to):
            self.peer(to).send_control(message)

    def wake(self) -> None:
        """The manager has work for `drain`; the next tick does it, since finalizers may call this anywhere."""

    # ------------------------------------------------------------ what arrives (I/O loop)

    def allocate(self, size_bytes: int) -> ReceiveBuffer:
        return ReceiveBuffer.allocate(size_bytes)

    def _on_loopback(self, session: Loopback, messages: list[tuple[rpc_pb2.Message, list[Any]]]) -> None:
        self.on_messages(session, messages)

    def on_messages(self, session: AnySession, messages: list[tuple[rpc_pb2.Message, list[Any]]]) -> None:
        jobs: list[Job] = []
        acknowledge = 0
        for message, buffers in messages:
            kind = message.WhichOneof("body")
            if kind == "reply":
                self._on_reply(session, message.reply, buffers, jobs)
            elif kind == "call":
                self.dispatcher.admit(session, message.call, buffers, jobs)
            elif kind == "rref":
                acknowledge = self._on_control(session, message) or acknowledge
            elif kind == "ack":
                self.peer(session.peer.id).acknowledged(message.ack.control_seq)
            elif kind == "stream_item":
                self._on_stream_item(session, message.stream_item, buffers)
            elif kind == "stream_end":
                end = message.stream_end
                self.streams.end(end.id, end.failure if end.HasField("failure") else None)
            elif kind == "stream_credit":
                self.dispatcher.credit(session, message.stream_credit.id, message.stream_credit.items)
            elif kind == "cancel":
                self.dispatcher.cancel(session, message.cancel.id)
        if acknowledge:
            session.send(rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=acknowledge)))
        if jobs:
            self.pool.submit_many(jobs)

    def _on_reply(
        self, session: AnySession, reply: rpc_pb2.Reply, buffers: Sequence[ReceiveBuffer], jobs: list[Job]
    ) -> None:
        payload: object = None
        if reply.HasField("value"):
            payload = Arrived(reply.value, buffers, self.rrefs, session.peer, not self.options.allow_pickle)
        call = self.calls.take(reply.id)
        if call is None:  # it timed out or was cancelled here
            if isinstance(payload, Arrived):
                payload.discard()
            return
        if reply.stream:
            timeout_s = None if call.timeout_s == float("inf") else call.timeout_s
            payload = self.streams.open(call.id, call.peer, session, call.what(), timeout_s)
        call.completer.replied(reply, payload, jobs)

    def _on_stream_item(self, session: AnySession, item: rpc_pb2.StreamItem, buffers: Sequence[ReceiveBuffer]) -> None:
        arrived = Arrived(item.value, buffers, self.rrefs, session.peer, not self.options.allow_pickle)
        self.streams.item(item.id, arrived)

    def _on_control(self, session: AnySession, message: rpc_pb2.Message) -> int:
        peer = session.peer
        inbox = self._inboxes.setdefault((peer.id, peer.incarnation), ControlInbox())
        if inbox.accept(message.control_seq):
            self.rrefs.on_message(peer.id, peer.incarnation, message.rref)
        return inbox.applied

    async def _deliver_rref(self, peer: Identity, message: rref_pb2.RRefMessage) -> rref_pb2.RRefDelivered:
        """The service method; the same handler as for messages in envelopes, which repeats do no harm to."""
        if self.closed:
            raise RpcdistError(f"worker {self.worker_name!r} has shut down RPC")
        self.rrefs.on_message(peer.id, peer.incarnation, message)
        return rref_pb2.RRefDelivered()

    def on_opened(self, session: Session) -> None:
        """A worker connected to us."""
        self._sessions.add(session)
        self._leases.seen(session.peer)
        if self.directory.is_news(session.peer):
            self.node.io.spawn(self._learn(), "rpcdist learn who connected")

    async def _learn(self) -> None:
        """Asks the coordinator who a stranger, or a known worker in a new incarnation, is."""
        assert self.membership is not None  # set before anybody can connect
        try:
            self.directory.update(await self.membership.members_async())
        except RpcdistError as exc:
            logger.warning("the coordinator did not say who is in the job: %s", exc)

    def on_replaced(self, identity: Identity) -> None:
        """Another process has the place of a worker; any thread."""
        self.node.io.call_soon(self._forget_incarnation, identity)

    def _forget_incarnation(self, identity: Identity) -> None:
        reason = "another process took its place"
        peer = self._peers.get(identity.id)
        if peer is not None and peer.identity == identity:
            peer.declare_lost(reason)
        self.rrefs.worker_lost(identity.id, WorkerLost(identity.name, "a connection", 0.0, reason), identity.incarnation)

    def on_closed(self, session: Session, reason: str) -> None:
        """A worker's connection to us ended; it may come back, and its lease says until when."""
        self._sessions.discard(session)
        self._leases.seen(session.peer)
        self.dispatcher.session_ended(session)
        self._shares_uncertain(session.peer)

    def on_peer_broken(self, peer: Peer, session: Session, reason: str) -> None:
        """Our connection to a worker ended: what was sent on it will not be answered."""

        def lost(what: str) -> WorkerLost:
            return WorkerLost(peer.identity.name, what, time.monotonic() - session.last_received, reason)

        for call in self.calls.take_where(lambda call: call.session is session):
            self.give_back(call.forks, call.peer)
            call.completer.failed(lost(call.what()))
        self.streams.fail_where(lambda _, on: on is session, lost)
        self._shares_uncertain(peer.identity)

    def on_peer_lost(self, peer: Peer, reason: str) -> None:
        """A worker is declared dead."""
        silence = time.monotonic() - peer.last_up
        for call in self.calls.take_where(lambda call: call.peer == peer.identity.id and call.session is None):
            call.completer.failed(WorkerLost(peer.identity.name, call.what(), silence, reason))
        exc = WorkerLost(peer.identity.name, "a connection", silence, reason)
        self.rrefs.worker_lost(peer.identity.id, exc, peer.identity.incarnation)
        for listener in list(self.loss_listeners):
            listener(peer.identity, exc)

    def _shares_uncertain(self, identity: Identity) -> None:
        if not self.closed:
            self.rrefs.connection_broken(identity.id)

    # ------------------------------------------------------------ time (I/O loop)

    def _wake_at(self, at: float) -> None:
        self.node.io.call_soon(self._arm, at)

    def _arm(self, at: float) -> None:
        loop = self.node.io.loop
        when = loop.time() + at - time.monotonic()
        if self._timer is not None and not self._timer.cancelled() and loop.time() < self._timer.when() <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for call in self.calls.take_expired():
            session = call.session
            if isinstance(session, Session) and call.transfer:
                session.abort_transfer(call.transfer, "the deadline of the call is over")
            self.give_back(call.forks, call.peer)
            call.completer.failed(call.deadline_error())

    def _tick(self) -> None:
        if self.closed:
            return
        try:
            self.rrefs.drain()
            self.streams.drain()
            self._renew_leases()
        finally:
            self._tick_handle = self.node.io.loop.call_later(TICK_S, self._tick)

    def _renew_leases(self) -> None:
        for session in self._sessions:
            self._leases.seen(session.peer, session.last_received)
        for peer in list(self._peers.values()):
            if peer.session is not None:
                self._leases.seen(peer.identity, peer.session.last_received)
        for identity in self._leases.take_ended():
            logger.info("the lease of worker %s ended", identity.name)
            self.rrefs.lease_ended(identity.id, identity.incarnation)

    # ------------------------------------------------------------ the end

    async def flush(self, timeout_s: float) -> None:
        """Waits until what was queued is written, and the peers that wait for it had time to leave first."""
        async with asyncio.timeout(timeout_s):
            peers = [peer.session for peer in self._peers.values() if peer.session is not None]
            await asyncio.gather(*(session.drain(timeout_s) for session in [*peers, *self._sessions]))
            if self.world_size is not None and self.worker_name == min(self.directory.names()):
                # The leader of the last round: its replies are on their way, and a stream that ends drops them.
                await asyncio.gather(*(session.ended(timeout_s) for session in list(self._sessions)))

    def close(self, timeout_s: float) -> None:
        """Ends everything at once; idempotent, bounded. What is left in flight fails."""
        if self.closed:
            return
        self.closed = True
        self.dispatcher.accepting = False
        stopped = RpcdistError("RPC was shut down in this process while the call was in flight")
        for call in self.calls.take_where(lambda call: True):
            call.completer.failed(stopped)
        self.streams.fail_where(lambda peer, session: True, lambda what: stopped)
        self.dispatcher.cancel_all()
        self.rrefs.close()
        self.node.handle_role(ROLE, None)
        self.node.run(self._close_connections(), timeout_s)
        self.user_loop.close(timeout_s)
        self.pool.close(timeout_s)

    async def _close_connections(self) -> None:
        for handle in (self._timer, self._tick_handle):
            if handle is not None:
                handle.cancel()
        for peer in self._peers.values():
            peer.close("the peer shut down RPC")
        for session in list(self._sessions):
            session.close("the peer shut down RPC")

    # ------------------------------------------------------------ a view inside

    def get_debug_info(self) -> dict[str, str]:
        """torch's keys, with text values."""
        stats = self.pool.stats()
        return {
            **self.rrefs.debug_info(),
            "agent.thread_pool_size": str(self.options.num_worker_threads),
            "agent.num_idle_threads": str(stats.idle),
            "agent.server_active_calls": str(len(self.dispatcher)),
            "agent.server_active_async_calls": str(len(self.dispatcher)),
            "agent.client_active_calls": str(len(self.calls)),
            **({"agent.gil_average_wait_time_us": f"{self.gil_wait.average_us():.3f}"} if self.gil_profiling else {}),
        }

    # ------------------------------------------------------------ torch's RpcAgent

    @property
    def is_static_group(self) -> bool:
        return self.world_size is not None

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        worker_id = self.worker_id if worker is None else self.resolve(worker)
        return WorkerInfo(self.worker_name_of(worker_id), worker_id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        if self.world_size is None:
            self.directory.refresh()
        return self.directory.infos()

    def get_metrics(self) -> dict[str, str]:
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Waits for outstanding work here and everywhere; see `rpcdist.rpc._shutdown.join`."""
        from rpcdist.rpc._shutdown import join  # it builds on this module

        join(self, float("inf") if timeout == 0 else timeout)

    def sync(self) -> None:
        """Nothing to do: an agent that exists is ready."""

    def shutdown(self) -> None:
        """Ends at once; see `close`."""
        self.close(CLOSE_LIMIT_S)

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        return dict(self.options.device_maps.get(dst.name, {}))
