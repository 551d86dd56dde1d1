"""The contents of a live view: rates and events, computed from successive queries of a job's workers.

Pure: answers in, plain data for JSON out. All stored data is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from typing import Any, Final

from rpcdist._dashboard.job_notes import JobNotes
from rpcdist.inspection import CallServed, ChannelFacts, SilentWorker, WorkerFacts, explain
from rpcdist.inspection.facts import JobFacts
from rpcdist.time_limits import LONG_WAIT_S

KEPT_EVENTS: Final = 200
KEPT_POINTS: Final = 600
"""The length of the curves of the whole job: five minutes at two queries a second."""

KEPT_CURVE_POINTS: Final = 1000
MAX_CURVES: Final = 100
MAX_FUNCTIONS: Final = 50
MAX_LINKS: Final = 500
MAX_REASONS: Final = 20
MAX_ACTORS: Final = 200
MAX_KINDS: Final = 8  # of channels; there are five
SHARED_MEMORY: Final = "shared memory"
_SHOWN: Final = ("id", "role", "host", "pid", "address", "age_s", "num_made", "num_served", "memory_bytes")
"""The facts of a worker that a view shows under their own names."""

_OWN_CALLS: Final = "rpcdist.rpc._membership."
_SHUTDOWN_CALL: Final = "rpcdist.rpc._membership.shutdown:depart"


class JobHistory:
    """The results of queries of one job. Not thread-safe."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}  # of each known worker at the last query: "answers", or as `SilentWorker`
        self._answers: dict[str, tuple[WorkerFacts, float]] = {}  # the last answer of each, and its time
        # The curves of the whole job, and the bytes by kind: one entry for each query.
        self._totals = {name: deque[float](maxlen=KEPT_POINTS) for name in ("time_s", "calls", "in_flight")}
        self._bytes_by_kind: dict[str, deque[float]] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._num_events = 0
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._notes = JobNotes()
        self._view: dict[str, Any] = {"job": "", "error": "no answer yet", "workers": []}
        self._is_lost = False

    def add(self, answers: JobFacts, at_s: float) -> None:
        if answers.error:
            if not self._is_lost:
                self._note(at_s, "lost", "", f"no worker answers: {answers.error}")
            self._is_lost = True
            self._view = {**self._view, "error": answers.error}
            return
        if self._is_lost:
            self._note(at_s, "back", "", "the job answers again")
        self._is_lost = False
        rows, by_kind = [], dict.fromkeys(self._bytes_by_kind, 0.0)
        links: dict[str, dict[str, Any]] = {}
        all_leave = all(facts.phase == "leaving" for facts in answers.workers)
        for facts in answers.workers:
            rows.append(self._row(facts, at_s, by_kind, all_leave))
            for channel in facts.channels:
                if len(links) < MAX_LINKS:
                    links.setdefault(channel.session, _link(facts.worker, channel))
            self._note_restarts(facts, at_s)
            self._answers[facts.worker] = facts, at_s
            self._states[facts.worker] = "answers"
            for curve in facts.curves:
                name = f"{facts.worker}: {curve.name}"
                if name in self._curves or len(self._curves) < MAX_CURVES:
                    _extend(self._curves.setdefault(name, []), curve.points)
        for silent in answers.silent:
            rows.append(self._silent_row(silent, at_s))
        self._note_departures(answers, at_s)
        self._notes.add(answers.workers, self._states.keys())
        self._add_totals(rows, by_kind, at_s)
        self._view = {
            "job": answers.job,
            "error": "",
            "time_s": at_s,
            "workers": rows,
            "links": list(links.values()),
            "functions": _functions(answers.workers),
            "actors": _actors(answers.workers),
            "waits": _waits(answers),
        }

    def view(self) -> dict[str, Any]:
        """The current state of the job, with the curves of the last minutes and all events, as data for JSON."""
        return {
            **self._view,
            **self._notes.view(),
            "events": list(self._events),
            "curves": dict(self._curves),
            "totals": {
                **{name: list(values) for name, values in self._totals.items()},
                "bytes": {kind: list(values) for kind, values in self._bytes_by_kind.items()},
            },
        }

    def facts_of(self, worker: str) -> WorkerFacts | None:
        """The last answer of a worker of the job."""
        facts, _ = self._answers.get(worker, (None, 0.0))
        return facts

    # ------------------------------------------------------------ rows

    def _row(self, facts: WorkerFacts, at_s: float, by_kind: dict[str, float], all_leave: bool) -> dict[str, Any]:
        before, before_s = self._answers.get(facts.worker, (None, at_s))
        if facts.worker not in self._states:
            self._note(at_s, "joined", facts.worker, f"{facts.worker} has joined: process {facts.pid} of {facts.host}")
        elif before is not None and before.incarnation != facts.incarnation:
            text = f"{facts.worker} was replaced by process {facts.pid} of {facts.host}"
            self._note(at_s, "replaced", facts.worker, text)
            before = None
        elif self._states[facts.worker] != "answers":
            self._note(at_s, "back", facts.worker, f"{facts.worker} answers again")
        passed_s = at_s - before_s if before is not None else 0.0
        sent = received = 0.0
        if before is not None:
            earlier = {key: amounts for key, _, *amounts in _traffic(before.channels)}
            for key, kind, num_sent, num_received in _traffic(facts.channels):
                sent_before, received_before = earlier.get(key, (0, 0))
                moved = max(0, num_sent - sent_before)
                sent += moved
                received += max(0, num_received - received_before)
                if passed_s > 0 and (
                    kind in by_kind or (len(by_kind) < MAX_KINDS and (kind != SHARED_MEMORY or moved))
                ):
                    by_kind[kind] = by_kind.get(kind, 0.0) + moved / passed_s
        made = facts.num_made - before.num_made if before is not None else 0
        served = facts.num_served - before.num_served if before is not None else 0
        calls = [call for call in facts.calls_made if call.counts_as_work]
        serving = _of_program(facts.calls_served)
        ages_s = [call.age_s for call in calls] + [call.age_s for call in serving]
        omitted = facts.omitted
        pool = facts.pool
        return {
            **{name: getattr(facts, name) for name in _SHOWN},
            "name": facts.worker,
            "state": "answers",
            "phase": "serving" if facts.phase == "leaving" and not all_leave else facts.phase,
            "detail": "",
            "made_rate": _rate(made, passed_s),
            "served_rate": _rate(served, passed_s),
            "sent_rate": _rate(sent, passed_s),
            "received_rate": _rate(received, passed_s),
            "calls": len(calls) + omitted.get("calls_made", 0),
            "serving": len(serving) + omitted.get("calls_served", 0),
            "oldest_s": max(ages_s, default=0.0),
            "references": len(facts.references) + omitted.get("references", 0),
            "contexts": len(facts.autograd_contexts) + omitted.get("autograd_contexts", 0),
            "passes": len(facts.backward_passes),
            "operations": sum(len(group.operations) for group in facts.groups),
            "actors": len(facts.actors) + omitted.get("actors", 0),
            "streams": len(facts.streams) + omitted.get("streams", 0),
            "queued": sum(channel.num_queued for channel in facts.channels),
            "lent_bytes": sum(lent.size_bytes for lent in facts.lent_memory),
            "refused": facts.strangers.refused,
            "pool": asdict(pool) if pool is not None else None,
            "latency_s": _latency(facts),
        }

    def _silent_row(self, silent: SilentWorker, at_s: float) -> dict[str, Any]:
        if self._states.get(silent.worker) != silent.state:
            self._note(at_s, "silent", silent.worker, f"{silent.worker} does not answer: {silent.detail}")
        self._states[silent.worker] = silent.state
        return {
            "name": silent.worker, "address": silent.address, "state": silent.state, "detail": silent.detail,
            "stacks": silent.stacks,
        }  # fmt: skip

    def _note_restarts(self, facts: WorkerFacts, at_s: float) -> None:
        before = self.facts_of(facts.worker)
        if before is None:  # the actors are new to this view
            return
        restarted = {actor.reference for actor in before.actors if actor.num_restarts}
        for actor in facts.actors:
            if actor.num_restarts and actor.reference not in restarted:
                text = f"actor {actor.kind} of {facts.worker} was restarted ({actor.num_restarts} so far)"
                self._note(at_s, "restarted", facts.worker, text)

    def _note_departures(self, answers: JobFacts, at_s: float) -> None:
        """Notes workers that left or were lost: no other worker lists them any more."""
        known = {facts.worker for facts in answers.workers} | {silent.worker for silent in answers.silent}
        lost = {one.name for facts in answers.workers for one in facts.members if one.is_lost}
        for name in [name for name in self._states if name not in known]:
            del self._states[name]
            self._answers.pop(name, None)
            if name in lost:
                self._note(at_s, "lost", name, f"{name} is lost")
            else:
                self._note(at_s, "left", name, f"{name} has left")

    def _add_totals(self, rows: Iterable[Mapping[str, Any]], by_kind: Mapping[str, float], at_s: float) -> None:
        totals = self._totals
        answering = [row for row in rows if row["state"] == "answers"]
        totals["calls"].append(sum(row["served_rate"] for row in answering))
        totals["in_flight"].append(sum(row["calls"] for row in answering))
        for kind, value in by_kind.items():
            if kind not in self._bytes_by_kind:  # zero until now
                self._bytes_by_kind[kind] = deque([0.0] * len(totals["time_s"]), maxlen=KEPT_POINTS)
            self._bytes_by_kind[kind].append(value)
        totals["time_s"].append(at_s)

    def _note(self, at_s: float, kind: str, worker: str, text: str) -> None:
        self._num_events += 1
        self._events.append({"id": self._num_events, "time_s": at_s, "kind": kind, "worker": worker, "text": text})


def _extend(curve: list[tuple[float, float]], points: Iterable[tuple[float, float]]) -> None:
    """Adds published points, oldest first. When there are too many, drops every second one of the older half."""
    last_s = curve[-1][0] if curve else -inf
    curve += [point for point in points if point[0] > last_s]
    while len(curve) > KEPT_CURVE_POINTS:
        half = len(curve) // 2
        curve[:half] = curve[:half:2]


def _of_program(calls: Iterable[CallServed]) -> list[CallServed]:
    """The calls of the program, without those by which workers join, leave and meet, which last as long as the job."""
    return [call for call in calls if not call.function.startswith(_OWN_CALLS)]


def _latency(facts: WorkerFacts) -> float | None:
    """The median time of recently served calls: over the worker's functions, weighted by the calls of each."""
    times = [one for one in facts.functions if one.served and not one.function.startswith(_OWN_CALLS)]
    count = sum(one.count for one in times)
    for one in sorted(times, key=lambda one: one.median_s):
        count -= 2 * one.count
        if count <= 0:
            return one.median_s
    return None


def _actors(workers: Iterable[WorkerFacts]) -> list[dict[str, Any]]:
    """The actors, those with the most waiting calls first."""
    found = [{"worker": facts.worker, **asdict(actor)} for facts in workers for actor in facts.actors]
    return sorted(found, key=lambda one: -one["num_waiting"])[:MAX_ACTORS]


def _traffic(channels: Iterable[ChannelFacts]) -> Iterator[tuple[str, str, int, int]]:
    """A key, the kind, and the bytes sent and received; bytes in shared memory are a separate kind."""
    for channel in channels:
        yield channel.session, channel.kind, channel.bytes_sent or 0, channel.bytes_received or 0
        if channel.shared_sent or channel.shared_received:
            yield f"{channel.session} shared", SHARED_MEMORY, channel.shared_sent, channel.shared_received


def _rate(amount: float, passed_s: float) -> float:
    return round(amount / passed_s, 1) if passed_s > 0 else 0.0


def _link(worker: str, channel: ChannelFacts) -> dict[str, Any]:
    ends = (worker, channel.peer) if channel.opened_here else (channel.peer, worker)
    return {
        "from": ends[0], "to": ends[1], "kind": channel.kind, "tls": channel.tls, "round_trip_s": channel.round_trip_s,
        "queued": channel.num_queued,
    }  # fmt: skip


def _functions(workers: Iterable[WorkerFacts]) -> list[dict[str, Any]]:
    """The functions that run or recently ran on any worker, those with the most running calls first."""
    found: dict[str, dict[str, Any]] = {}

    def entry(function: str) -> dict[str, Any]:
        new = {"function": function, "running": 0, "waiting": 0, "oldest_s": 0.0, "ended": 0, "failed": 0}
        return found.setdefault(function, {**new, "median_s": 0.0, "longest_s": 0.0})

    for facts in workers:
        for call in _of_program(facts.calls_served):
            one = entry(call.function)
            one["running" if call.phase in ("running", "producing") else "waiting"] += 1
            one["oldest_s"] = max(one["oldest_s"], call.age_s)
        for times in facts.functions:
            if times.served and times.count > 0 and not times.function.startswith(_OWN_CALLS):
                one = entry(times.function)
                total = one["ended"] + times.count
                one["median_s"] = (one["median_s"] * one["ended"] + times.median_s * times.count) / total
                one["ended"], one["failed"] = total, one["failed"] + times.failed
                one["longest_s"] = max(one["longest_s"], times.longest_s)
    most = sorted(found.values(), key=lambda one: (-one["running"] - one["waiting"], -one["ended"], one["function"]))
    return most[:MAX_FUNCTIONS]


def _without_shutdown(facts: WorkerFacts) -> WorkerFacts:
    """The facts without the calls by which workers shut down, and without waits for them."""
    ids = {call.id for call in facts.calls_made if call.function == _SHUTDOWN_CALL}
    return replace(
        facts,
        calls_made=tuple(call for call in facts.calls_made if call.id not in ids),
        calls_served=tuple(call for call in facts.calls_served if call.function != _SHUTDOWN_CALL),
        threads=tuple(
            replace(one, waits_for=tuple(id for id in one.waits_for if id not in ids)) for one in facts.threads
        ),
    )


def _waits(answers: JobFacts) -> dict[str, Any]:
    """The reasons why the job waits, in sentences, except for workers that serve until the others shut down."""
    workers: Sequence[WorkerFacts] = answers.workers
    if any(facts.phase != "leaving" for facts in workers):
        workers = [_without_shutdown(facts) for facts in workers]
    found = explain(workers, answers.silent, LONG_WAIT_S)
    return {
        "deadlocks": list(found.deadlocks[:MAX_REASONS]),
        "culprits": [{"text": text, "chains": number} for text, number in found.culprits[:MAX_REASONS]],
    }
