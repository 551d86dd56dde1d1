"""The agent: one per process, it owns everything that RPC uses, and routes what arrives.

Threads: public functions run on the caller's thread; `on_*` run on the I/O loop and never run user code there; user
code runs in the pool and on the user loop.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rpcdist import _upper_layers
from rpcdist._proto import autograd_pb2, rpc_pb2, rref_pb2, value_pb2
from rpcdist.errors import PoolExhausted, RpcdistError
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import AutogradHooks, CallContext, MakeAutograd
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._calling.reply_sinks import Job
from rpcdist.rpc._calling.result_streams import StreamTable
from rpcdist.rpc._calling.waiting import replace_torch_functions
from rpcdist.rpc._executors import torch_state
from rpcdist.rpc._executors.gil_wait import GilWait
from rpcdist.rpc._executors.timers import Timers
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._executors.worker_pool import WorkerPool
from rpcdist.rpc._membership.directory import Directory
from rpcdist.rpc._membership.gatherings import Gatherings, Leader
from rpcdist.rpc._peers.connections import Connections
from rpcdist.rpc._peers.loopback import Loopback
from rpcdist.rpc._peers.network import SendObserver
from rpcdist.rpc._rref.identifiers import UniqueId
from rpcdist.rpc._rref.manager import RRefManager
from rpcdist.rpc._serving.dispatcher import Dispatcher, describe_job
from rpcdist.rpc._values import LargeBuffer, ReceiveBuffer, encode_into
from rpcdist.rpc._values.arrived import ArrivedValue, OutgoingRRefs
from rpcdist.rpc.future import Future
from rpcdist.rpc.options import RpcOptions
from rpcdist.rpc.rref import PyRRef
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.time_limits import AGENT_TICK_S, RPC_CLOSE_LIMIT_S
from rpcdist.transport import Node, Session

if TYPE_CHECKING:
    from rpcdist.collectives import Store
    from rpcdist.rpc._calling.interrupt import InterruptWatch
    from rpcdist.rpc._membership.coordinator import Coordinator

__all__ = ["ROLE", "Agent", "AnySession"]

logger = logging.getLogger(__name__)

ROLE = "rpc"
RREF_SERVICE = rref_pb2.DESCRIPTOR.services_by_name["RRef"]
AUTOGRAD_SERVICE = autograd_pb2.DESCRIPTOR.services_by_name["Autograd"]

AnySession = Session | Loopback


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
        self.closed = False
        self.ending = threading.Lock()  # of `shutdown`
        self.has_ended = False
        self.pool = WorkerPool(
            max_threads=options.max_worker_threads,
            prepare=torch_state.adopt_num_threads,
            cleanup=torch_state.reset,
            on_exhausted=self._on_exhausted,
            describe=describe_job,
        )
        self.user_loop = UserLoop()
        self.loopback = Loopback(self.identity, ReceiveBuffer.allocate, self.on_messages)
        self.connections = Connections(self)
        self.rrefs = RRefManager(self)
        self.caller = Caller(self)
        self.streams = StreamTable(self)
        self.dispatcher = Dispatcher(self)
        self.gatherings = Gatherings()
        self.leader = Leader(self)
        self.gil_profiling = False
        self.gil_wait = GilWait()
        self.membership: Coordinator | None = None  # these three are given by `start_agent`
        self.interrupts: InterruptWatch | None = None
        self.store: Store | None = None
        self.autograd: AutogradHooks | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        self._restore_torch: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        calls = f"{len(self.caller.calls)} calls out, {len(self.dispatcher)} in"
        return f"<Agent {self.worker_name} ({self.worker_id}) [{calls}]>"

    def start(self) -> None:
        """Opens for business; any thread but the loop's."""
        self.user_loop.start()
        make_autograd: MakeAutograd = _upper_layers.load("autograd")
        self.autograd = make_autograd(_AutogradLinks(self))
        self._restore_torch = replace_torch_functions()
        atexit.register(self._abandon)
        self.node.add_service(AUTOGRAD_SERVICE, {"Deliver": self._deliver_autograd})
        self.node.add_service(RREF_SERVICE, {"Deliver": self._deliver_rref})
        self.node.handle_role(ROLE, self.connections, self.connections.refusal)
        self.node.io.call_soon(self._tick)

    # ------------------------------------------------------------ what the references need (`RRefHost`)

    def worker_name_of(self, worker_id: int) -> str:
        return self.directory.name_of(worker_id)

    def incarnation_of(self, worker_id: int) -> int:
        return self.directory.incarnation_of(worker_id)

    def send_control(self, to: int, message: rref_pb2.RRefMessage) -> None:
        """Sends a control message reliably; any thread, never blocks."""
        if to == self.worker_id:
            self.rrefs.on_message(self.worker_id, self.incarnation, message)
        elif not self.closed:
            self.connections.send_control(to, message)

    def wake(self) -> None:
        """The manager has work for `drain`; the next tick does it, since finalizers may call this anywhere."""

    def fetch(self, owner: int, rref: UniqueId, fork: UniqueId, timeout_s: float) -> Future[Any]:
        return self.caller.fetch(owner, rref, fork, timeout_s)

    # ------------------------------------------------------------ values and replies

    def encode_for(
        self, value: value_pb2.Value, obj: object, to: int, autograd: CallContext | None = None
    ) -> tuple[list[LargeBuffer], list[value_pb2.RRefFork]]:
        """Encodes for a worker; remote references inside are shared with it, tensors that require grad recorded."""
        externals = OutgoingRRefs(self.rrefs, PyRRef, to, value)
        record = None if autograd is None else lambda tensors: autograd.sending(value, tensors, to)
        try:
            large = encode_into(
                value,
                obj,
                externals,
                by_value=self.options.by_value,
                map_device=self.directory.device_map(to),
                on_tensors=record,
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

    def _on_exhausted(self, error: PoolExhausted, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """A job found no thread for too long. Callers are told; what completes calls of ours runs all the same."""
        if function == self.dispatcher.run:
            self.dispatcher.fail(arguments[0], error)
        else:
            threading.Thread(target=function, args=arguments, name="rpcdist-overflow", daemon=True).start()

    # ------------------------------------------------------------ what arrives (I/O loop)

    def on_messages(self, session: AnySession, messages: list[tuple[rpc_pb2.Message, list[Any]]]) -> None:
        if self.closed:
            return
        jobs: list[Job] = []
        for message, buffers in messages:
            kind = message.WhichOneof("body")
            if kind == "reply":
                self._on_reply(session, message.reply, buffers, jobs)
            elif kind == "call":
                self.dispatcher.admit(session, message.call, buffers, jobs)
            elif kind == "autograd" and not message.control_seq:
                if self.autograd is not None:
                    self.autograd.on_message(session.peer, message.autograd, buffers)
            elif kind == "rref" or kind == "autograd":
                self.connections.take_control(session, message)
            elif kind == "ack":
                self.connections.acknowledged(session, message.ack.control_seq)
            elif kind == "stream_item":
                self._on_stream_item(session, message.stream_item, buffers)
            elif kind == "stream_end":
                end = message.stream_end
                self.streams.end(end.id, end.failure if end.HasField("failure") else None)
            elif kind == "stream_credit":
                self.dispatcher.credit(session, message.stream_credit.id, message.stream_credit.items)
            elif kind == "cancel":
                self.dispatcher.cancel(session, message.cancel.id)
        if jobs:
            self.pool.submit_many(jobs)

    def _on_reply(
        self, session: AnySession, reply: rpc_pb2.Reply, buffers: Sequence[ReceiveBuffer], jobs: list[Job]
    ) -> None:
        payload: object = None
        if reply.HasField("value"):
            payload = ArrivedValue(reply.value, buffers, self.rrefs, session.peer, not self.options.allow_pickle)
        call = self.caller.calls.take(reply.id)
        if call is None:  # it timed out or was cancelled here
            if isinstance(payload, ArrivedValue):
                payload.discard()
            elif reply.stream:
                session.send(rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=reply.id)))
            return
        if reply.stream:
            timeout_s = None if call.timeout_s == float("inf") else call.timeout_s
            payload = self.streams.open(call, session, timeout_s)
        elif isinstance(payload, ArrivedValue):
            payload.autograd = call.autograd
        call.reply_sink.replied(reply, payload, jobs)

    def _on_stream_item(self, session: AnySession, item: rpc_pb2.StreamItem, buffers: Sequence[ReceiveBuffer]) -> None:
        arrived = ArrivedValue(item.value, buffers, self.rrefs, session.peer, not self.options.allow_pickle)
        self.streams.item(item.id, arrived)

    async def _deliver_rref(self, peer: Identity, message: rref_pb2.RRefMessage) -> rref_pb2.RRefDelivered:
        """The service method; the same handler as for messages in envelopes, which repeats do no harm to."""
        if self.closed:
            raise RpcdistError(f"worker {self.worker_name!r} has shut down RPC")
        self.rrefs.on_message(peer.id, peer.incarnation, message)
        return rref_pb2.RRefDelivered()

    async def _deliver_autograd(
        self, peer: Identity, message: autograd_pb2.AutogradMessage
    ) -> autograd_pb2.AutogradDelivered:
        if self.closed or self.autograd is None:
            raise RpcdistError(f"worker {self.worker_name!r} has shut down RPC")
        self.autograd.on_message(peer, message, ())
        return autograd_pb2.AutogradDelivered()

    def _tick(self) -> None:
        if self.closed:
            return
        try:
            self.rrefs.drain()
            self.streams.drain()
            self.connections.renew_leases()
        finally:
            self._tick_handle = self.node.io.loop.call_later(AGENT_TICK_S, self._tick)

    # ------------------------------------------------------------ the end

    def close(self, timeout_s: float) -> None:
        """Ends everything at once; idempotent, bounded. What is left in flight fails."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._abandon)
        self.dispatcher.accepting = False
        if self.interrupts is not None:
            self.interrupts.stop()
        self._restore_torch()
        stopped = RpcdistError("RPC was shut down in this process while the call was in flight")
        self.caller.fail_all(stopped)
        self.streams.fail_where(lambda peer, session: True, lambda what: RpcdistError(*stopped.args))
        self.dispatcher.cancel_all()
        if self.autograd is not None:
            self.autograd.close()
        self.rrefs.close()
        if self.world_size is None and self.membership is not None:
            self._say_goodbye(self.membership)
        self.node.handle_role(ROLE, None)
        self.node.run(self._close_connections(), timeout_s)
        self.user_loop.close(timeout_s)
        self.pool.close(timeout_s)

    def _abandon(self) -> None:
        """At the exit of a process that did not call `shutdown`, before its threads end: nobody is told any more what
        happens to calls. The others see a connection that ends, like that of any process that dies.
        """
        self.closed = True

    def _say_goodbye(self, membership: Coordinator) -> None:
        try:
            membership.leave()
        except RpcdistError as exc:
            logger.debug("the coordinator did not hear that this worker leaves: %s", exc)

    async def _close_connections(self) -> None:
        self.caller.stop_timer()
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self.connections.close("the peer shut down RPC")

    async def flush(self, timeout_s: float, together: bool) -> None:
        """Waits until what was queued is written; `together` says that all the others leave now, too."""
        # The leader of the last round has replies on their way, and a stream that ends drops them: it leaves last.
        is_leader = together and self.world_size is not None and self.worker_name == min(self.directory.names())
        await self.connections.flush(timeout_s, wait_for_others=is_leader)

    # ------------------------------------------------------------ a view inside

    def get_debug_info(self) -> dict[str, str]:
        """torch's keys, with text values."""
        stats = self.pool.stats()
        return {
            **self.rrefs.debug_info(),
            **(self.autograd.counts() if self.autograd is not None else {}),
            "agent.thread_pool_size": str(self.options.num_worker_threads),
            "agent.num_idle_threads": str(stats.idle),
            "agent.server_active_calls": str(len(self.dispatcher)),
            "agent.server_active_async_calls": str(len(self.dispatcher)),
            "agent.client_active_calls": str(len(self.caller.calls)),
            **({"agent.gil_average_wait_time_us": f"{self.gil_wait.average_us():.3f}"} if self.gil_profiling else {}),
        }

    # ------------------------------------------------------------ torch's RpcAgent

    @property
    def is_static_group(self) -> bool:
        return self.world_size is not None

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        worker_id = self.worker_id if worker is None else self.directory.resolve(worker)
        return WorkerInfo(self.worker_name_of(worker_id), worker_id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        if self.world_size is None:
            self.directory.refresh()
        return self.directory.infos(present=self.world_size is None)

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
        self.close(RPC_CLOSE_LIMIT_S)

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        return dict(self.options.device_maps.get(dst.name, {}))


class _AutogradLinks:
    """The agent, as distributed autograd sees it: `AutogradHost`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.identity = agent.identity
        self.allow_pickle = agent.options.allow_pickle
        self.default_mode = agent.options.autograd_mode
        self.timeout_of = agent.caller.timeout_of
        self.worker_name_of = agent.directory.name_of
        self.device_map = agent.directory.device_map
        self.silence_s = agent.connections.silence_s
        self.submit = agent.pool.submit
        self.call_later = Timers(agent.node.io).call_later
        self.send_control = agent.connections.send_control

    @property
    def is_closed(self) -> bool:
        return self._agent.closed

    def send(
        self,
        to: int,
        message: autograd_pb2.AutogradMessage,
        buffers: Sequence[LargeBuffer] = (),
        observer: SendObserver | None = None,
    ) -> None:
        self._agent.connections.peer(to).send(rpc_pb2.Message(autograd=message), buffers, observer)
