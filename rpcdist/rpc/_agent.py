"""The agent: the parts of one RPC worker, wired together, started and stopped.

    caller              makes calls                        dispatcher    runs the calls of others
    router, inbound     connections, in both directions    demultiplexer takes arriving messages apart
    rrefs               counts remote references           marshal       encodes values with their references
    pool, user_loop     run code of users                  directory     knows the members
    gatherings          barriers and the like              leaving       waits until all workers may leave
    news, watch         workers that join and leave        rounds        in which all agree to leave

Nothing else happens here: a part gets its dependencies in its constructor. Threads: public functions run on the
caller's thread; `on_*` run on the I/O loop, and run no user code, which runs in the pool and on the user loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

import torch

from rpcdist._counters import Histogram
from rpcdist._proto import autograd_pb2, rref_pb2
from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.collectives import Store
from rpcdist.collectives._group.world import current_world
from rpcdist.errors import NotInitialized, RpcdistError, WorkerLost
from rpcdist.frozen_process import allow_inspection, forbid_inspection
from rpcdist.ids import Identity
from rpcdist.private_files import flight_recorder_size
from rpcdist.rpc._actors.actor_names import ActorNames, ActorTable
from rpcdist.rpc._autograd_hooks import AutogradHooks
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._calling.result_streams import StreamTable
from rpcdist.rpc._calling.retries import Retries
from rpcdist.rpc._calling.rref_calls import RRefCalls
from rpcdist.rpc._devices.gpu_sharing import GpuSharing
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._executors.user_loop import UserLoop
from rpcdist.rpc._futures.waiting import replace_torch_functions
from rpcdist.rpc._inspection.call_records import CallRecorder
from rpcdist.rpc._inspection.flight_log import FlightLog
from rpcdist.rpc._inspection.live_notes import NoteTaker
from rpcdist.rpc._marshal.marshal import Marshal
from rpcdist.rpc._membership.barrier import Gatherings
from rpcdist.rpc._membership.coordinator import Coordinator, CoordinatorSearch
from rpcdist.rpc._membership.roster_news import GOODBYE, MembershipNews, MembershipWatch
from rpcdist.rpc._membership.shutdown import STOP, ShutdownRounds, StopRequests
from rpcdist.rpc._peers.connections import PROBE_ROLE, Connections, LeaseWatch
from rpcdist.rpc._peers.control import ControlReceiver
from rpcdist.rpc._peers.device_maps import DeviceMaps
from rpcdist.rpc._peers.directory import Directory, Event, PeerEvents, Roster
from rpcdist.rpc._peers.network import AnySession, Demultiplexer, Lifetime, Network
from rpcdist.rpc._peers.router import Router
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._serving.active_calls import Callables
from rpcdist.rpc._serving.dispatcher import Dispatcher, describe_job
from rpcdist.rpc.options import RpcOptions
from rpcdist.rpc.worker_info import WorkerInfo
from rpcdist.time_limits import CLOSE_LIMIT_S, CONNECTION_CLOSE_LIMIT_S, SLOW_ANSWER_LIMIT_S, TICK_S
from rpcdist.transport.io_loop import Timer
from rpcdist.transport.session import NullHandler
from rpcdist.transport.wire_messages import CallMessage, CompactPass, ReplyMessage

logger = logging.getLogger(__name__)

ROLE = "rpc"
AUTOGRAD_SERVICE = autograd_pb2.DESCRIPTOR.services_by_name["Autograd"]
RREF_SERVICE = rref_pb2.DESCRIPTOR.services_by_name["RRef"]


class Agent:
    """See the module. `start_agent` makes it; `close` ends it.

    Args:
        world_size: None if workers join and leave.
        look_up: returns the address of the next coordinator, after this one was lost; blocks, bounded.
        rref_type: the class of references; this and the rest belong to higher layers.
        make_rref: makes a reference from a handle.
        make_autograd: makes distributed autograd; `rpcdist._upper_layers` lists it.
        make_inspector: makes the `Inspector`, which collects the facts of the agent from its parts.
        make_leaving: makes the `Leaving`, which waits for the work of the agent.
        context_of: makes the context in which an agent is the current one, for the user code that the agent runs.
        current: the current agent, if there is one.
    """

    def __init__(
        self,
        *,
        network: Network,
        coordinator: Coordinator,
        me: Identity,
        roster: Roster,
        options: RpcOptions,
        world_size: int | None,
        store: Store,
        look_up: Callable[[], str],
        rref_type: type,
        make_rref: Callable[[RRefCalls, Handle], Any],
        make_autograd: Callable[[Agent], AutogradHooks],
        make_inspector: Callable[[Agent], Any],
        make_leaving: Callable[[Agent], Any],
        context_of: Callable[[Agent], Context],
        current: Callable[[], Agent | None],
    ) -> None:
        self.network = network
        self.options = options
        self.world_size = world_size
        self.identity = me
        self.worker_id = me.id
        self.worker_name = me.name
        self.ending = threading.Lock()  # of `shutdown`
        self.has_ended = False
        self.was_abandoned = False  # the process ended without `close`
        self.counts: Any = None  # of `rpcdist.metrics`, set when metrics are requested
        self.coordinator = coordinator
        self._store = store
        io, is_static, context = network.io, world_size is not None, context_of(self)
        self.recorder = recorder = CallRecorder(size) if (size := flight_recorder_size()) else None
        self.context = context
        self._lifetime = lifetime = Lifetime()

        self.pool = ThreadPool(
            max_threads=options.max_worker_threads,
            on_exhausted=lambda *job: self.dispatcher.on_exhausted(*job),
            describe=describe_job,
            new_context=context.copy,
        )
        self.user_loop = UserLoop()

        self.events = events = PeerEvents()
        self.directory = Directory(
            me,
            roster,
            coordinator.members,
            coordinator.members_async,
            io,
            events.replaced.publish,
            events.member.publish,
            coordinator.rank,
        )
        self._device_maps = DeviceMaps(me.name, options.device_maps, self.directory.name_of)
        self._demultiplexer = Demultiplexer(
            self.pool.submit_many,
            lifetime,
            options,
            self.directory.holder_of,
            lambda session, message: self.gpus.stage(session, message),
        )
        self._control = ControlReceiver(io, lifetime)
        self.router = Router(
            network,
            self.directory,
            self._demultiplexer,
            self._control,
            events,
            lifetime,
            options.peer_timeout,
            lambda deadline: self._search.attempt(deadline),
            self._device_maps.introduction,
            self.pool.submit,
        )
        self.connections = Connections(self._demultiplexer, self.directory, events, self.router, self._control)
        self._leases = LeaseWatch(options.peer_timeout, self.connections.sessions, events)

        self.actors = ActorTable(self.pool, self.user_loop)
        self.rrefs = RRefShell(
            self.directory,
            self.router.send_control,
            self.router.flush,
            lambda handle: make_rref(self.rref_calls, handle),
            self.actors.released,
        )
        self.gpus = GpuSharing(
            me,
            lambda to: self.directory.member(to).identity,
            self._device_maps.find,
            lambda *call: self.caller.start_gathering(*call),
            self.router.send_if_alive,
            self.pool.submit,
            lambda sender, part: self.autograd.announced_gradients(sender, part),
            takes_loans=options.allow_pickle,
            lends=options.lends_gpu_memory,
        )
        self.marshal = Marshal(
            self.rrefs, rref_type, self.gpus, me.name, by_value=options.by_value, allow_pickle=options.allow_pickle
        )
        self.streams = StreamTable(self.router.send_if_alive, self.marshal)
        self.caller = Caller(
            directory=self.directory,
            router=self.router,
            marshal=self.marshal,
            streams=self.streams,
            submit=self.pool.submit,
            io=io,
            lifetime=lifetime,
            rpc_timeout_s=options.rpc_timeout,
            max_in_flight_bytes=options.max_in_flight_bytes,
            on_handler_loop=self.user_loop.on_thread,
            recorder=recorder,
        )
        self.call_later = partial(Timer, io)
        self.autograd = make_autograd(self)
        self.retries = Retries(self.caller, self.directory, self.call_later, self.pool.submit)
        self.rref_calls = RRefCalls(
            self.rrefs,
            self.caller,
            self.retries,
            self.actors,
            self.directory,
            self.autograd,
            options.autograd_mode,
            lifetime,
            self.router,
        )
        service = coordinator.service
        self.actor_names = ActorNames(
            me, self.directory, self.caller, lambda: service is not None and service.has_predecessor
        )
        self.gatherings = Gatherings(self.caller, self.directory, self.router.watch, is_static)
        self.rounds = ShutdownRounds(self.directory, self.router.watch)
        self.serving = StopRequests()
        self._search = CoordinatorSearch(
            coordinator=coordinator,
            directory=self.directory,
            router=self.router,
            submit=self.pool.submit,
            look_up=look_up,
            world_size=world_size,
            recovery_s=options.peer_timeout,
            orphan_timeout_s=options.orphan_timeout or float("inf"),
            on_orphaned=self.serving.orphaned,
            io=io,
            lifetime=lifetime,
        )
        self._news = MembershipNews(
            self.directory,
            coordinator.service,
            self.router.send_control,
            self.router.watch,
            lifetime,
            self._search.is_coordinator,
        )
        self.watch = MembershipWatch(self.pool.submit, lifetime)
        always = {
            **self.actor_names.callables,
            **self.gatherings.callables,
            **self.rounds.callables,
            **self.serving.callables,
            **self.gpus.callables,
        }
        if not options.allows(*STOP.split(":")):  # where peers are restricted, not each of them may end the service
            del always[STOP]
        self.callables = Callables(options, always, me.name)
        self.dispatcher = Dispatcher(
            pool=self.pool,
            user_loop=self.user_loop,
            new_context=context.copy,
            marshal=self.marshal,
            rrefs=self.rrefs,
            actors=self.actors,
            callables=self.callables,
            admit_context=self.autograd.admit,
            me=me,
            lifetime=lifetime,
            recorder=recorder,
        )
        self.leaving = make_leaving(self)
        operations = current_world().process.recorder.entries
        self.notes = NoteTaker(lambda: current() is self, self.autograd.pass_taps, operations)
        self.inspector = make_inspector(self)
        self.flight_log: FlightLog | None = None
        if recorder is not None:
            self.flight_log = FlightLog(
                recorder, self.inspector.facts, self.directory.name_of, self.connections.sessions, lifetime
            )
        self._ticks: Event[[float]] = Event()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._restore_torch: Callable[[], None] = lambda: None
        self._wire_messages()
        self._wire_events()

    def __repr__(self) -> str:
        calls = f"{len(self.caller.calls)} calls out, {len(self.dispatcher.calls)} in"
        return f"<Agent {self.worker_name} ({self.worker_id}) [{calls}]>"

    def _wire_messages(self) -> None:
        """Which part takes which kind of message."""
        handle = self._demultiplexer.handle
        handle(CallMessage, self.dispatcher.on_call)
        handle(ReplyMessage, self.caller.on_reply)
        handle(CompactPass, self.autograd.on_pass)
        handle("cancel", self.dispatcher.on_cancel)
        handle("call_question", self.dispatcher.on_question)
        handle("call_state", self.caller.calls.on_state)
        handle("stream_item", self.streams.on_item)
        handle("stream_end", self.streams.on_end)
        handle("stream_credit", self.dispatcher.on_credit)
        handle("rref", self._control.on_message)
        handle("autograd", self._control.on_message)
        handle("membership", self._control.on_message)
        handle("ack", self.router.on_acknowledgement)
        handle("device_map", self._device_maps.on_message)
        handle("gpu_release", self.gpus.on_release)
        if self.flight_log is not None:
            handle("failure_notice", self.flight_log.on_notice)
        self._control.handle("autograd", self.autograd.on_message)
        self._control.handle("membership", self._news.on_message)
        self._control.handle(
            "rref", lambda sender, body, buffers: self.rrefs.on_message(sender.id, sender.incarnation, body)
        )

    def _wire_events(self) -> None:
        """Connects the parts with the events of connections and workers. The order matters three times:

        - The flight log is written before the calls fail that it shows.
        - References come after calls and handlers: a call that fails gives its shares back itself, and only those of
          calls that are still in flight count as under way.
        - Parts that free or fail gatherings come last: calls that they wake must find the dead worker's values gone.
        """
        events, references = self.events, self.rrefs
        if self.flight_log is not None:
            events.broken.listen(self.flight_log.on_broken)
            events.lost.listen(self.flight_log.on_lost)
        events.broken.listen(self._on_broken, self.caller.calls.on_broken, self.streams.on_broken)
        events.broken.listen(self.dispatcher.on_broken, self.rref_calls.on_broken, self._device_maps.forget)
        events.broken.listen(self.gpus.on_broken, self._news.on_broken)
        events.lost.listen(self._on_lost, self.gpus.on_gone, references.on_lost)
        events.lost.listen(lambda identity, error: self.actors.lost(identity), self.directory.on_lost)
        events.lost.listen(self.coordinator.on_lost, self.gatherings.on_lost, self._search.on_lost)
        events.replaced.listen(self.gpus.on_gone, references.on_replaced, self.actors.lost, self._control.forget)
        events.member.listen(self.gpus.on_member, self._control.on_member, self.watch.on_member, self.rounds.on_member)
        events.lease_ended.listen(references.on_lease_ended, self._on_lease_ended)
        events.found.listen(references.on_found, self.directory.on_found, self.coordinator.on_found)
        self._ticks.listen(
            lambda now: self.rrefs.drain(), lambda now: self.streams.drain(), lambda now: self.gpus.tick()
        )
        self._ticks.listen(self._leases.check, self.inspector.log_old_calls, self.notes.stop_if_unused)

    def _on_broken(self, session: AnySession, reason: str) -> None:
        """Reports the end of a connection to distributed autograd.

        The contexts of a process that is no worker of the job end with it, since the process is never declared lost.
        """
        if not self._lifetime.is_closed:
            silence_s = time.monotonic() - session.last_received
            error = WorkerLost(session.peer.name, "a backward pass", silence_s, reason)
            self.autograd.worker_lost(session.peer, error)
            if not self.directory.knows(session.peer.id):
                self.autograd.worker_dead(session.peer)

    def _on_lost(self, identity: Identity, error: WorkerLost) -> None:
        if not self._lifetime.is_closed:
            lost = WorkerLost(error.worker, "a backward pass", error.last_seen_s, error.reason)
            self.autograd.worker_lost(identity, lost)
            self.autograd.worker_dead(identity)

    def _on_lease_ended(self, identity: Identity) -> None:
        """Forgets processes that are not workers, since their number has no limit."""
        if self.directory.is_news(identity) and not self.directory.was_replaced(identity):
            self._control.forget(identity)
            self._leases.forget(identity)
            self.rrefs.forget(identity.process)

    # ------------------------------------------------------------ beginning and end

    def start_serving(self) -> None:
        """Begins to serve; on any thread except the loop's."""
        self.user_loop.register_at_exit()
        self.pool.start_kept_thread()
        self._restore_torch = replace_torch_functions()
        if self.flight_log is not None:
            self.flight_log.start_listening()
        register_at_exit(self._abandon)
        network = self.network
        for service, kind, reply in (
            (AUTOGRAD_SERVICE, "autograd", autograd_pb2.AutogradDelivered),
            (RREF_SERVICE, "rref", rref_pb2.RRefDelivered),
        ):
            network.add_service(service, {"Deliver": self._control.service_method(kind, reply, self._leases.seen)})
        network.add_service(self.inspector.service, self.inspector.methods)
        allow_inspection()
        network.handle_role(ROLE, self.connections, self.connections.refusal)
        network.handle_role(PROBE_ROLE, NullHandler(), self._search.on_probe)
        network.run(self._news.begin(), SLOW_ANSWER_LIMIT_S)
        network.io.call_soon(self._search.begin_watching)
        network.io.call_soon(self._tick)

    def _tick(self) -> None:
        if self._lifetime.is_closed:
            return
        self._ticks.publish(time.monotonic())
        self._tick_handle = self.network.io.loop.call_later(TICK_S, self._tick)

    @property
    def is_closed(self) -> bool:
        """Whether the agent is shutting down, or has shut down."""
        return self._lifetime.is_closed

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> None:
        """Ends everything at once; idempotent, bounded. Calls in flight fail."""
        if self._lifetime.is_closed:
            return
        self._lifetime.is_closed = True
        unregister_at_exit(self._abandon)
        if self.flight_log is not None:
            self.flight_log.stop()
        self.dispatcher.accepting = False
        self._restore_torch()
        stopped = "RPC was shut down in this process while the call was in flight"
        self.caller.calls.fail_all(NotInitialized(stopped))
        self.retries.fail_all(NotInitialized(stopped))
        self.streams.fail_all(stopped)
        self.serving.stop("RPC was shut down in this process")
        self.dispatcher.calls.cancel_all()
        self.autograd.close()
        self.gpus.close(timeout_s)
        self.rrefs.close()
        self.actors.close()  # after the references: the object of an actor ends on its thread
        self._say_goodbye()
        self.network.handle_role(ROLE, None)
        self.network.handle_role(PROBE_ROLE, None)
        try:
            self.network.run(self._close_connections(), timeout_s)
        except RpcdistError as exc:  # the threads below end all the same
            logger.error("worker %r did not close its connections in order: %s", self.worker_name, exc)
        self.user_loop.close(timeout_s)
        self.pool.close(timeout_s)
        forbid_inspection()

    def _say_goodbye(self) -> None:
        if self.is_static_group:
            return
        try:
            self.coordinator.leave()
        except RpcdistError as exc:
            logger.debug("the coordinator could not be notified that this worker leaves: %s", exc)

    def _abandon(self) -> None:
        """Ends the agent of a process that exits without `shutdown`, before its threads end.

        Calls get no outcome any more. The other workers see a broken connection, as when a process dies.
        """
        if self.flight_log is not None:
            self.flight_log.ended(getattr(sys, "last_value", None))
        self.was_abandoned = True
        self._lifetime.is_closed = True

    async def _close_connections(self) -> None:
        self.caller.calls.stop_timer()
        self._search.close()
        self._news.close()
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        self.notes.stop()
        if not self.is_static_group and self.coordinator.service is None:
            await self.connections.send_last(GOODBYE, CONNECTION_CLOSE_LIMIT_S)
        self.connections.close("the peer shut down RPC")

    def release(self) -> None:
        """Releases the store and the network; call it after `close`. Blocks, bounded."""
        self._store.close()
        self.network.release()

    # ------------------------------------------------------------ a view inside

    def profile_gil(self, flag: bool) -> None:
        """Measures how long handlers wait for the interpreter lock."""
        self.dispatcher.gil_waits = (self.dispatcher.gil_waits or Histogram()) if flag else None

    def get_debug_info(self) -> dict[str, str]:
        """torch's keys, with text values."""
        found = {
            **self.rrefs.debug_info(),
            **self.autograd.counts(),
            "agent.thread_pool_size": str(self.options.num_worker_threads),
            "agent.num_idle_threads": str(self.pool.facts().idle),
            "agent.server_active_calls": str(len(self.dispatcher.calls)),
            "agent.server_active_async_calls": str(len(self.dispatcher.calls)),
            "agent.client_active_calls": str(len(self.caller.calls)),
        }
        if (waits := self.dispatcher.gil_waits) is not None:
            found["agent.gil_average_wait_time_us"] = f"{waits.total_s / max(1, sum(waits.counts)) * 1e6:.3f}"
        return found

    # ------------------------------------------------------------ torch's RpcAgent

    @property
    def is_static_group(self) -> bool:
        """Whether the number of workers is fixed."""
        return self.world_size is not None

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Name and id of a worker, by default of this one. Raises `UnknownWorker`."""
        return self.directory.info(self.worker_id if worker is None else self.directory.resolve(worker))

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Names and ids of all workers."""
        if self.world_size is None:
            self.directory.refresh()
        return self.directory.infos(present=self.world_size is None)

    def get_metrics(self) -> dict[str, str]:
        """Counts of this worker, under torch's names."""
        return self.get_debug_info()

    def join(
        self, shutdown: bool = False, timeout: float = 0, delete_references: Callable[[], object] | None = None
    ) -> dict[str, str]:
        """Waits for outstanding work here and everywhere; 0 for no limit. See `Leaving.wait_for_work`."""
        self.inspector.is_leaving = True
        limit_s = float("inf") if timeout == 0 else timeout
        lost: dict[str, str] = self.leaving.wait_for_work(limit_s, delete_references)
        return lost

    def sync(self) -> None:
        """Nothing to do: an agent that exists is ready."""

    def shutdown(self) -> None:
        """Ends at once; see `close`."""
        self.close()

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        return dict(self.options.device_maps.get(dst.name, {}))
