"""Collects the facts of a worker on request; nothing runs or is kept before the first request.

The I/O loop answers: not the pool, which may be exhausted, nor the user loop, which may be stuck. Tables are copied in
single steps that the interpreter does not interrupt, so no lock of the call path is taken. The limits below bound
the cost of an answer, and `TICK_S` bounds how often one is made.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final

from rpcdist._counters import published_curves
from rpcdist._proto import inspection_pb2
from rpcdist.collectives._group.world import current_world
from rpcdist.frozen_process import FrozenProcess, inspect_process
from rpcdist.ids import Identity
from rpcdist.inspection import (
    CallServed,
    Limit,
    MemberFacts,
    StreamFacts,
    WorkerFacts,
    describe,
    explain,
    facts_from_json,
    facts_to_json,
)
from rpcdist.rpc._actors.serial_actor import Turn
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._executors.user_loop import UserCall
from rpcdist.rpc._inspection.stacks import call_of_future, coroutine_stack, thread_states
from rpcdist.rpc._serving.active_calls import ActiveCall
from rpcdist.time_limits import LONG_WAIT_S, LOOK_LIMIT_S, SLOW_CHECK_INTERVAL_S, TICK_S
from rpcdist.transport.unix_sockets import INSPECTION_ROLE, process_at
from rpcdist.waiters import run_in_thread

logger = logging.getLogger(__name__)

MAX_LISTED: Final = 500
"""Limit on the entries of each list of facts."""

MAX_FUNCTIONS: Final = 50
MAX_NAMED: Final = 10
MAX_ANSWER_BYTES: Final = 1 << 20
_PHASES: Final = {
    "QUEUED": "queued",
    "RUNNING": "running",
    "WAITING": "waiting",
    "STREAMING": "producing",
    "IN_LINE": "in line",
    "ENDED": "running",
}


class Inspector:
    """Collects the facts of an agent from its parts. `is_leaving` is set when `shutdown` was called."""

    service = inspection_pb2.DESCRIPTOR.services_by_name["Inspection"]

    def __init__(self, agent: Agent) -> None:
        self.is_leaving = False
        self._agent = agent
        self._world = current_world()
        self._began = time.monotonic()
        # By `is_brief` and `has_members`: the time of the last answer, and the answer.
        self._answers: dict[tuple[bool, bool], tuple[float, bytes]] = {}
        self._is_inspecting = False
        self._logged_until = 0.0  # calls that began before this time were old at the last check
        self._next_check = 0.0
        coordinator = agent.directory.incarnation_of(agent.directory.coordinator)
        job = agent.options.job or os.environ.get("RPCDIST_JOB") or "default"
        self._job = f"{job}/{coordinator & (1 << 64) - 1:x}"

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        return {"Look": self._on_look, "LookAtNeighbour": self._on_neighbour}

    # ------------------------------------------------------------ I/O loop

    async def _on_look(self, asker: Identity, request: inspection_pb2.LookRequest) -> inspection_pb2.LookReply:
        wanted = request.is_brief, request.has_members or not request.is_brief  # full facts always have members
        at, answer = self._answers.get(wanted, (0.0, b""))
        if not answer or time.monotonic() - at >= TICK_S:
            answer = self._json(*wanted)
            self._answers[wanted] = time.monotonic(), answer
        notes = facts_to_json(self._agent.notes.since(request.after)).encode() if request.is_live else b""
        return inspection_pb2.LookReply(facts=answer, notes=notes)

    async def _on_neighbour(
        self, asker: Identity, request: inspection_pb2.NeighbourRequest
    ) -> inspection_pb2.NeighbourReply:
        """Inspects a silent worker of this host. Only workers of this job get our signal, one at a time."""
        known = {member.address for member in self._agent.directory.known()}
        if request.address not in known or self._is_inspecting:
            detail = "it is not a worker of this job, or another inspection is running"
            return inspection_pb2.NeighbourReply(state="unknown", detail=detail)
        self._is_inspecting = True
        try:
            found = await run_in_thread(partial(_inspect_process, request.address), lambda: None, "rpcdist-inspect")
        finally:
            self._is_inspecting = False
        return inspection_pb2.NeighbourReply(state=found.state, detail=found.detail, stacks=found.stacks)

    def _json(self, is_brief: bool = False, has_members: bool = False) -> bytes:
        """The facts as JSON; if the text is too long, rarely needed lists are left out."""
        facts = self._brief_facts(has_members) if is_brief else self.facts()
        text = facts_to_json(facts)
        for smaller in ("references", "streams", "threads", "calls_made", "calls_served"):
            if len(text) <= MAX_ANSWER_BYTES:
                break
            left_out = len(getattr(facts, smaller))
            changes: dict[str, Any] = {smaller: (), "omitted": {**facts.omitted, smaller: left_out}}
            facts = replace(facts, **changes)
            text = facts_to_json(facts)
        return text.encode()

    def _brief_facts(self, has_members: bool) -> WorkerFacts:
        """The facts with the stacks of all threads only if something takes long, and otherwise of the main thread.

        The main thread of a rank that has not joined a collective shows what the others wait for.
        """
        facts = self.facts(is_brief=True, has_members=has_members)
        ages_s = [call.age_s for call in facts.calls_made] + [call.age_s for call in facts.calls_served]
        if facts.backward_passes or facts.gatherings or max(ages_s, default=0.0) >= LONG_WAIT_S / 2:
            threads, left_out = thread_states()
            omitted = {**facts.omitted, "threads": left_out} if left_out else facts.omitted
            facts = replace(facts, threads=tuple(threads), omitted=omitted)
        return facts

    # ------------------------------------------------------------ any thread

    def facts(self, is_brief: bool = False, has_members: bool = False) -> WorkerFacts:
        """The facts of this moment. Brief facts have the main thread only, and members only on request."""
        agent, now, time_ns = self._agent, time.monotonic(), time.time_ns()
        threads, threads_left_out = thread_states(threading.main_thread().ident if is_brief else None)
        references, references_left_out = agent.rrefs.facts(now, MAX_LISTED)
        contexts, passes = agent.autograd.facts(now, MAX_LISTED)
        sessions = agent.connections.sessions()[:MAX_LISTED]
        me, made, served = agent.identity, agent.caller.calls, agent.dispatcher.calls
        calls_served = self.calls_served(now)
        omitted = {
            "calls_made": max(0, len(made) - MAX_LISTED),
            "calls_served": max(0, len(served) - MAX_LISTED),
            "streams": max(0, len(agent.streams) - MAX_LISTED),
            "threads": threads_left_out,
            "references": references_left_out,
        }
        return WorkerFacts(
            worker=me.name,
            id=me.id,
            incarnation=f"{me.incarnation & (1 << 64) - 1:x}",
            job=self._job,
            role=agent.options.role,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=agent.network.address or "",
            time_ns=time_ns,
            age_s=now - self._began,
            phase="leaving" if self.is_leaving else "working",
            members=() if is_brief and not has_members else self._members(),
            calls_made=tuple(call.facts(now) for call in islice(made, MAX_LISTED)),
            calls_served=calls_served,
            threads=tuple(threads),
            streams=(*agent.streams.facts(MAX_LISTED), *self._produced()),
            references=tuple(references),
            autograd_contexts=tuple(contexts),
            backward_passes=tuple(passes),
            groups=tuple(self._world.facts(time_ns)),
            gatherings=(*agent.gatherings.facts(), *agent.rounds.facts()),
            actors=tuple(agent.actors.facts(now, MAX_LISTED)),
            pool=agent.pool.facts(),
            channels=tuple(session.facts(now) for session in sessions),
            lent_memory=tuple(lent for session in sessions if (lent := session.lent_memory) is not None),
            limits=self._limits(),
            strangers=agent.network.strangers,
            num_made=made.num_made,
            num_served=served.num_served,
            omitted={name: number for name, number in omitted.items() if number},
            functions=() if agent.recorder is None else agent.recorder.times(MAX_FUNCTIONS),
            curves=published_curves(),
            memory_bytes=_memory_bytes(),
        )

    def ask(self, worker_id: int) -> WorkerFacts:
        """The facts of another worker; blocks, bounded. Raises `ConnectFailed`."""
        network, member = self._agent.network, self._agent.directory.member(worker_id)

        async def look() -> WorkerFacts:
            link = await network.connect(
                member.address, INSPECTION_ROLE, LOOK_LIMIT_S, expected=member.identity, retry=False
            )
            try:
                request = inspection_pb2.LookRequest()
                reply = await link.unary("Inspection", "Look", request, inspection_pb2.LookReply, LOOK_LIMIT_S)
            finally:
                await link.close()
            return facts_from_json(reply.facts)

        return network.run(look(), 2 * LOOK_LIMIT_S)

    def explain(self) -> str:
        """Describes what the calls here wait for, with their stacks."""
        return describe(explain([self.facts()]))

    def calls_served(self, now: float) -> tuple[CallServed, ...]:
        threads = self._threads_of_calls()
        return tuple(self._served(active, now, threads) for active in islice(self._agent.dispatcher.calls, MAX_LISTED))

    def _threads_of_calls(self) -> dict[int, int]:
        """The thread that runs each call, by the `id` of the call or of the object that runs it."""
        found: dict[int, int] = {}
        for ident, job, arguments in self._agent.pool.jobs():
            for one in (*arguments, getattr(job, "__self__", None)):
                found.setdefault(id(one), ident)
        return found

    def _served(self, active: ActiveCall, now: float, threads: dict[int, int]) -> CallServed:
        state, handle, producer = active.state(), active.handle, active.producer
        thread = next(
            (threads[id(one)] for one in (active, handle, producer) if one is not None and id(one) in threads), None
        )
        coroutine: object = handle
        if isinstance(handle, Turn):
            coroutine = getattr(handle.coroutine, "__self__", None)
        elif producer is not None:
            coroutine = getattr(producer, "_handle", None)
        stack, waits_for = coroutine_stack(coroutine) if isinstance(coroutine, UserCall) else ((), ())
        if isinstance(coroutine, UserCall) and getattr(coroutine, "cr_running", False):
            thread, stack = self._agent.user_loop.ident, ()
        if active.awaited is not None:
            waits_for = (*waits_for, *call_of_future(active.awaited))
        phase = _PHASES[type(state).Phase.Name(state.phase)]
        return CallServed(
            id=active.id,
            session=active.session.id.hex(),
            function=active.what[:MAX_LISTED],
            caller=active.session.peer.name,
            phase=phase,
            age_s=now - active.arrived,
            running_s=state.running_us / 1e6 if state.running_us else None,
            remaining_s=active.deadline.at - now if active.deadline.is_finite else None,
            is_cancelled=active.cancelled,
            thread=thread if phase not in ("queued", "in line") else None,
            stack=stack,
            waits_for=waits_for,
            on="" if active.value is None else repr(active.value.rref),
            is_coroutine=isinstance(coroutine, UserCall),
            creates="" if active.result is None else repr(active.result.rref),
        )

    def _produced(self) -> list[StreamFacts]:
        return [
            StreamFacts(
                active.id, active.session.id.hex(), active.what[:MAX_LISTED], active.session.peer.name, "produces",
                getattr(active.producer, "_credits", 0),
            )
            for active in islice(self._agent.dispatcher.calls, MAX_LISTED)
            if active.producer is not None
        ]  # fmt: skip

    def _members(self) -> tuple[MemberFacts, ...]:
        directory = self._agent.directory
        living = [(member, False) for member in directory.living()]
        lost = [(member, True) for member in directory.known() if not directory.is_living(member.identity.id)]
        return tuple(
            MemberFacts(member.identity.name, member.identity.id, member.address, member.role, is_lost)
            for member, is_lost in [*living, *lost][: 2 * MAX_LISTED]
        )

    def _limits(self) -> tuple[Limit, ...]:
        agent, in_flight = self._agent, self._agent.caller.in_flight
        pool = agent.pool.facts()
        found = [
            Limit("worker threads", pool.threads - pool.idle, pool.max_threads, pool.queued, "max_worker_threads"),
            Limit("lent threads", agent.pool.num_reserved, agent.pool.max_threads, 0, "max_worker_threads"),
        ]
        for worker, (num_bytes, num_waiting) in in_flight.usage().items():
            name = f"bytes in flight to {agent.directory.name_of(worker)}"
            found.append(Limit(name, num_bytes, in_flight.limit_bytes, num_waiting, "max_in_flight_bytes"))
        return tuple(found[:MAX_LISTED])

    # ------------------------------------------------------------ calls that take long; I/O loop

    def log_old_calls(self, now: float) -> None:
        """Logs each call once that is older than `RpcOptions(log_calls_after=...)`; `now` is in monotonic seconds.

        Both tables are in the order in which calls came, so this costs nothing while the first call of each is young.
        """
        limit_s = self._agent.options.log_calls_after
        if not limit_s or now < self._next_check:
            return
        self._next_check = now + SLOW_CHECK_INTERVAL_S
        old_before, seen_until = now - limit_s, self._logged_until
        self._logged_until = old_before
        calls_made, calls_served = self._agent.caller.calls.by_age(), self._agent.dispatcher.calls.by_age()
        made = ((call.made, call.what) for call in calls_made if call.counts_as_work)
        served = ((call.arrived, call.__repr__) for call in calls_served if call.counts_as_work)
        found = [*_new_ones(made, seen_until, old_before), *_new_ones(served, seen_until, old_before)]
        if not found:
            return
        facts = self.facts()
        more = f" and {len(found) - MAX_NAMED} others" if len(found) > MAX_NAMED else ""
        logger.warning(
            "these calls have not ended on %s for %.0f s: %s%s. `python -m rpcdist stacks %s` follows them to other "
            "workers; RpcOptions(log_calls_after=...) sets the limit\n%s",
            facts.worker,
            limit_s,
            "; ".join(found[:MAX_NAMED]),
            more,
            facts.address,
            describe(explain([facts], older_than_s=limit_s)),
        )


def _memory_bytes() -> int | None:
    """The resident memory of this process, including shared pages."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None


def _inspect_process(address: str) -> FrozenProcess:
    pid = process_at(address)
    if pid is None or pid == os.getpid():
        return FrozenProcess("unknown", f"no other process of this user on {socket.gethostname()} serves at {address}")
    return inspect_process(pid)


def _new_ones(calls: Iterable[tuple[float, Callable[[], str]]], seen_until: float, old_before: float) -> Iterator[str]:
    """Describes the calls that began in the given span of time; `calls` are in the order in which they began."""
    for began, what in calls:
        if began > old_before:
            return
        if began > seen_until:
            yield what()
