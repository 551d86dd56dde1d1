"""One picture of the calls of all workers of a job: a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    with rpcdist.trace("trace.json"):
        train_one_epoch()

During the block each worker notes the calls that it makes and serves, the operations of its process groups, the parts
and messages of its backward passes, the streams that it reads, the buckets of `DistributedDataParallel` and the actions
of its pipeline stages. At the end of the block this worker gathers the notes, aligns the clocks by round trips, and
writes the file: a process for each worker, a slice for each call at both ends, and arrows between them for the call and
the reply.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final, NamedTuple

from rpcdist import rpc
from rpcdist._counters import OK
from rpcdist.collectives._group.world import current_world
from rpcdist.errors import ConfigError, RpcdistError, SerializationError, abridged, raised_as
from rpcdist.profile_ranges import span_taps
from rpcdist.rpc._autograd_hooks import outside_contexts
from rpcdist.rpc._current import agent_local, agent_or_none, current_agent
from rpcdist.rpc._inspection import call_records
from rpcdist.rpc._inspection.call_records import Row
from rpcdist.time_limits import QUICK_ANSWER_LIMIT_S, RPC_TIMEOUT_S

__all__ = ["Notes", "export_to_opentelemetry", "trace", "trace_events"]

logger = logging.getLogger(__name__)

MAX_CALLS: Final = 200_000
MAX_CALLS_EVER: Final = 1_000_000
MAX_SPANS: Final = 50_000
NUM_ROUND_TRIPS: Final = 7
MIN_QUEUED: Final = 20.0  # microseconds; shorter parts of a call have no slice
MAX_FUNCTION_CHARS: Final = 200
MAX_ANSWER_BYTES: Final = 512 << 20
_NEVER_SHOWN: Final = "rpcdist.tracing"


Hop = tuple[int, int, bool, int, float, float]
Slice = tuple[float, float, Any]  # begin, end and content


class Notes(NamedTuple):
    """The notes of one worker, with times in seconds of its monotonic clock.

    Attributes:
        worker, id: its name and rank.
        made, served: rows of calls: number, the rank at the other end, function, begin, end, outcome, and the time at
            which the function was called (0 if it is not known).
        spans: lane, name, begin, end.
        omitted: the number of oldest calls that exceeded the limit, and were dropped.
        offset_s: the difference between the clock of the worker that writes the file and this one.
        error_s: the largest error of the offset.
        hops: the messages of backward passes: the pass, the rank at the other end, whether it was sent here, its number
            among the pass's messages in this direction between the two workers, begin and end.
    """

    worker: str
    id: int
    made: Sequence[Row]
    served: Sequence[Row]
    spans: Sequence[tuple[str, str, float, float]]
    omitted: int = 0
    offset_s: float = 0.0
    error_s: float = 0.0
    hops: Sequence[Hop] = ()


@contextmanager
def trace(path: str | os.PathLike[str], max_calls: int = MAX_CALLS, timeout: float = RPC_TIMEOUT_S) -> Iterator[None]:
    """Writes a file of the calls of all workers during the block; blocks at both ends of the block.

    Workers that join during the block are left out, and so are lost workers, with a warning. The file is written even
    if the block raises. Several traces may overlap; each has all calls of its block.

    Args:
        path: the file, which is replaced.
        max_calls: limit on the calls kept by each worker, for those made and those served; the latest ones are kept.
        timeout: limit in seconds for the answer of each worker, at the beginning and at the end.

    Raises:
        NotInitialized: this process is not a worker.
        ConfigError: `max_calls` is not a number from 1 to 1,000,000, or the file cannot be written.
        BlockingInLoop: called on an event loop; use it on a thread.
    """
    if isinstance(max_calls, bool) or not isinstance(max_calls, int) or not 1 <= max_calls <= MAX_CALLS_EVER:
        raise ConfigError(f"max_calls={max_calls!r}: give the number of calls of each worker, 1 to 1,000,000")
    owner = f"{current_agent().worker_name}/{next(_numbers)}"
    target = Path(path)
    with raised_as(ConfigError, f"the trace {target} cannot be written", OSError):
        target.open("a").close()  # an existing file stays until the new content exists
    asked = [worker.name for worker in rpc.workers()]
    try:
        asked = list(_ask(asked, _begin, (owner, max_calls), timeout))
        if not asked:
            raise RpcdistError("no worker takes part in the trace; the warnings above say why")
        yield
    finally:
        notes: list[Notes] = []
        for worker, answer in _ask(asked, _end, (owner,), timeout).items():
            try:
                notes.append(_with_clock(_notes_from(answer), worker, timeout))
            except SerializationError as error:  # the notes of the other workers are still valid
                logger.warning("worker %r is not in the trace: %s", worker, error)
        if notes:
            with raised_as(ConfigError, f"the trace {target} is not complete", OSError):
                _write(target, notes)
        if omitted := sum(one.omitted for one in notes):
            logger.warning(
                "the trace %s lacks the %d oldest calls: max_calls is %d for each worker", target, omitted, max_calls
            )


def export_to_opentelemetry(tracer_provider: Any = None) -> None:
    """Exports the spans of this process to OpenTelemetry; needs `pip install 'rpcdist[otel]'` and an SDK.

    A call that a worker makes is a span of kind CLIENT, and one that it serves a span of kind SERVER. Where both ends
    export, the second is a child of the first, by the W3C's trace context, and calls that a function makes are children
    of the call that runs it. The parts of a backward pass are children of one span on all workers. Call it before
    `init_rpc`; a second call replaces the provider.

    Args:
        tracer_provider: the tracer provider of the SDK; by default the global one.

    Raises:
        ConfigError: the package `opentelemetry-api` is missing.
    """
    with raised_as(ConfigError, "this needs opentelemetry-api: pip install 'rpcdist[otel]'", ImportError):
        call_records.export(call_records.CallSpans(tracer_provider))


def _write(target: Path, notes: list[Notes]) -> None:
    with target.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for index, event in enumerate(trace_events(notes)):
            file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(notes: Iterable[Notes]) -> Iterator[dict[str, Any]]:
    """The events in Chrome's trace format, which Perfetto reads. Times are in microseconds."""
    notes = list(notes)
    starts = [row[3] + one.offset_s for one in notes for row in (*one.made, *one.served)]
    starts += [span[2] + one.offset_s for one in notes for span in one.spans]
    starts += [hop[4] + one.offset_s for one in notes for hop in one.hops]
    zero = min(starts, default=0.0)
    made = {(one.id, row[1], row[0]) for one in notes for row in one.made}
    # When the callee had ended each call, for calls with notes of both ends; a lost worker has sent none.
    known = {
        call: row[4] + one.offset_s - zero
        for one in notes
        for row in one.served
        if (call := (row[1], one.id, row[0])) in made
    }
    ways = [{_way(one, hop) for one in notes for hop in one.hops if hop[2] is is_sent} for is_sent in (True, False)]
    arrived = ways[0] & ways[1]
    for one in notes:
        clock = f", clock known to {one.error_s * 1e3:.2f} ms" if one.error_s else ""
        yield {"ph": "M", "pid": one.id, "name": "process_name", "args": {"name": f"{one.worker}{clock}"}}
        yield {"ph": "M", "pid": one.id, "name": "process_sort_index", "args": {"sort_index": one.id}}
        tracks: list[tuple[str, list[Slice], Callable[[Notes, Any, float, float], Iterable[dict[str, Any]]]]] = [
            (title, [(row[3], row[4], row) for row in rows], partial(_call_events, is_served=is_served, known=known))
            for title, rows, is_served in (("calls made", one.made, False), ("calls served", one.served, True))
        ]
        hops = [(hop[4], hop[5], hop) for hop in one.hops]
        tracks.append(("messages of backward passes", hops, partial(_hop_events, arrived=arrived)))
        spans: dict[str, list[Slice]] = {}
        for title, name, begin, end in one.spans:
            spans.setdefault(title, []).append((begin, end, name))
        tracks += [(title, slices, partial(_span_events, title)) for title, slices in spans.items()]
        ids = itertools.count(1)
        for title, slices, events in tracks:
            for lane in _lanes(slices):
                tid = next(ids)
                yield {"ph": "M", "pid": one.id, "tid": tid, "name": "thread_name", "args": {"name": title}}
                for begin, end, content in lane:
                    times_us = [(moment + one.offset_s - zero) * 1e6 for moment in (begin, end)]
                    for event in events(one, content, *times_us):
                        yield {**event, "pid": one.id, "tid": tid}


def _slice(name: str, category: str, begin_us: float, end_us: float, **more: object) -> dict[str, Any]:
    duration_us = max(0.0, end_us - begin_us)
    return {
        "ph": "X", "name": name, "cat": category, "ts": round(begin_us, 1), "dur": round(duration_us, 1), **more,
    }  # fmt: skip


def _span_events(title: str, one: Notes, name: str, begin_us: float, end_us: float) -> Iterator[dict[str, Any]]:
    yield _slice(name, title, begin_us, end_us)


def _call_events(
    one: Notes, row: Row, begin_us: float, end_us: float, is_served: bool, known: Mapping[tuple[int, int, int], float]
) -> Iterator[dict[str, Any]]:
    """A slice with its parts, and one end of each of the two arrows between it and the slice at the other worker.

    The parts are `queued` and `running` at the callee, and `replying` at the caller, from the end at the callee.
    """
    id, peer, function, began, _, outcome, called_at = row
    arguments: dict[str, Any] = {"call": id, "caller" if is_served else "callee": peer}
    if outcome != OK:
        arguments["outcome"] = outcome
    yield _slice(str(function), "served" if is_served else "made", begin_us, end_us, args=arguments)
    arrow = (peer, one.id, id) if is_served else (one.id, peer, id)
    parts: list[tuple[str, float, float]] = []
    if is_served and called_at:
        running_us = begin_us + (called_at - began) * 1e6
        parts = [("queued", begin_us, running_us), ("running", running_us, end_us)]
    elif arrow in known:
        parts = [("replying", known[arrow] * 1e6, end_us)]
    for part, from_us, until_us in parts:
        from_us, until_us = max(begin_us, from_us), min(end_us, until_us)
        if until_us - from_us >= MIN_QUEUED:
            yield _slice(part, part, from_us, until_us)
    if arrow in known:
        number = "{}.{}.{}".format(*arrow)
        head, tail = {"ph": "f", "bp": "e"}, {"ph": "s"}
        call, reply = (head, tail) if is_served else (tail, head)
        start_us = round(begin_us, 1)
        yield {**call, "ts": start_us, "id": number, "name": "call", "cat": "call"}
        in_slice_us = max(start_us, round(end_us - 0.1, 1))
        yield {**reply, "ts": in_slice_us, "id": f"{number}.reply", "name": "reply", "cat": "reply"}


def _way(one: Notes, hop: Hop) -> tuple[int, int, int, int]:
    """The pass, the two workers and the number of a message: equal at both ends."""
    id, peer, is_sent, number, _, _ = hop
    return (id, one.id, peer, number) if is_sent else (id, peer, one.id, number)


def _hop_events(
    one: Notes, hop: Hop, begin_us: float, end_us: float, arrived: Container[tuple[int, int, int, int]]
) -> Iterator[dict[str, Any]]:
    """A slice for a message of a backward pass, and its end of the arrow to the slice at the other worker."""
    id, peer, is_sent, _, _, _ = hop
    arguments = {"pass": id, "receiver" if is_sent else "sender": peer}
    name = "sends gradients" if is_sent else "takes gradients"
    made = _slice(name, "backward", begin_us, max(end_us, begin_us + 0.1), args=arguments)
    yield made
    if _way(one, hop) in arrived:  # the notes of both ends have it
        head = {"ph": "s"} if is_sent else {"ph": "f", "bp": "e"}
        number = "pass " + ".".join(map(str, _way(one, hop)))
        yield {**head, "ts": made["ts"], "id": number, "name": "hop", "cat": "hop"}


def _lanes(items: list[Slice]) -> list[list[Slice]]:
    """Distributes slices over lanes, so that no two in a lane overlap."""
    lanes: list[list[Slice]] = []
    taken: list[tuple[float, int]] = []  # end of the last slice, and lane; both lists are heaps, for thousands of lanes
    free: list[int] = []
    for item in sorted(items, key=lambda item: item[0]):
        while taken and taken[0][0] <= item[0]:
            heappush(free, heappop(taken)[1])
        if free:
            lane = heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        heappush(taken, (item[1], lane))
        lanes[lane].append(item)
    return lanes


# ---------------------------------------------------------------- at each worker


class _Recording:
    """The notes of one worker for one running trace."""

    def __init__(self, max_calls: int) -> None:
        agent = current_agent()
        self._agent = weakref.ref(agent)
        self.made: deque[Row] = deque(maxlen=max_calls)
        self.served: deque[Row] = deque(maxlen=max_calls)
        self.spans: deque[tuple[str, str, float, float]] = deque(maxlen=MAX_SPANS)
        self.hops: deque[Hop] = deque(maxlen=MAX_SPANS)
        self.began = time.monotonic()
        self.began_ns = time.time_ns()
        self._num_made, self._num_served = agent.caller.calls.num_made, agent.dispatcher.calls.num_served
        self._undo = [
            agent.caller.calls.ended.add(self.made.append),
            agent.dispatcher.calls.ended.add(self.served.append),
        ]
        taps = agent.autograd.pass_taps
        taps.append(self._pass_spans)
        span_taps.append(self._span)
        self._undo += [lambda: taps.remove(self._pass_spans), lambda: span_taps.remove(self._span)]

    def _span(self, lane: str, name: str, begin_s: float, end_s: float) -> None:
        agent = self._agent()
        if agent is None:  # it has ended, so no worker will ask for its notes
            with suppress(ValueError):
                span_taps.remove(self._span)
        elif agent_or_none() is agent:  # several workers may live in one process
            self.spans.append((lane, name[:MAX_FUNCTION_CHARS], begin_s, end_s))

    def _pass_spans(
        self, id: int, spans: Iterable[tuple[str, int, float, float]], hops: Iterable[Sequence[Any]]
    ) -> None:
        shift = time.monotonic() - time.time()
        self.spans.extend([("backward", kind, start_s + shift, end_s + shift) for kind, _, start_s, end_s in spans])
        numbers: Counter[tuple[str, int]] = Counter()
        for way, peer, start_s, end_s in hops:
            numbers[way, peer] += 1
            self.hops.append((id, peer, way == "to", numbers[way, peer], start_s + shift, end_s + shift))

    def end(self) -> Notes:
        """Ends it; returns the notes."""
        for undo in self._undo:
            undo()
        agent = current_agent()
        shift = self.began - self.began_ns / 1e9
        for record in current_world().process.recorder.entries():
            if record.ended_ns and record.started_ns >= self.began_ns:
                begin, end = record.started_ns / 1e9 + shift, record.ended_ns / 1e9 + shift
                self.spans.append((f"group {record.group}", record.operation, begin, end))
        omitted = _num_omitted(self.made, agent.caller.calls.num_made - self._num_made)
        omitted += _num_omitted(self.served, agent.dispatcher.calls.num_served - self._num_served)
        shown, hops = _shown(self.served), list(self.hops)
        return Notes(agent.worker_name, agent.worker_id, _shown(self.made), shown, list(self.spans), omitted, hops=hops)


def _num_omitted(rows: deque[Row], num_begun: int) -> int:
    """The number of rows that a full queue has dropped; other queues have dropped none."""
    return max(0, num_begun - len(rows)) if len(rows) == rows.maxlen else 0


def _shown(rows: Iterable[Row]) -> list[Row]:
    return [
        (id, peer, text, began, ended, outcome, called_at)
        for id, peer, function, began, ended, outcome, called_at in rows
        if not (text := str(function)[:MAX_FUNCTION_CHARS]).startswith(_NEVER_SHOWN)
    ]


_recordings: Callable[[], dict[str, _Recording]] = agent_local(dict)  # by trace, for each worker
_numbers: Final = itertools.count(1)
_MAX_AT_ONCE: Final = 8


def _begin(owner: str, max_calls: int) -> None:
    """At each worker: begins a recording."""
    running = _recordings()
    living = {worker.name for worker in rpc.workers()}
    for abandoned in [one for one in running if one.rpartition("/")[0] not in living]:
        running.pop(abandoned).end()
    if len(running) >= _MAX_AT_ONCE:
        raise ConfigError(f"{_MAX_AT_ONCE} traces run on worker {current_agent().worker_name!r} already")
    running[owner] = _Recording(min(max_calls, MAX_CALLS_EVER))


def _end(owner: str) -> bytes:
    """At each worker: ends the recording, and returns the notes."""
    recording, agent = _recordings().pop(owner, None), current_agent()
    if recording is None:
        raise ConfigError(f"worker {agent.worker_name!r} has no trace {owner!r}")
    agent.dispatcher.calls.wait_noted(QUICK_ANSWER_LIMIT_S)  # a call is noted after its answer was sent
    return json.dumps(recording.end(), separators=(",", ":")).encode()


def _now() -> float:
    """At each worker: its clock."""
    return time.monotonic()


# ---------------------------------------------------------------- at the worker that writes


def _ask(workers: list[str], function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> dict[str, Any]:
    """Calls all workers in parallel; returns the answers by worker, without workers that failed."""
    with outside_contexts():
        futures = {worker: rpc.rpc_async(worker, function, args=args, timeout=timeout) for worker in workers}
        answers: dict[str, Any] = {}
        for worker, future in futures.items():
            try:
                answers[worker] = future.wait()
            except Exception as error:  # e.g. a worker without free memory; the others are still in the trace
                logger.warning("worker %r is not in the trace: %s", worker, error)
    return answers


def _notes_from(answer: bytes) -> Notes:
    """The notes that a worker has sent; raises `SerializationError`."""
    damaged = (ValueError, TypeError, OverflowError, RecursionError)
    with raised_as(SerializationError, "the trace of a worker cannot be read", *damaged):
        if not isinstance(answer, bytes) or len(answer) > MAX_ANSWER_BYTES:
            raise ValueError("it is too long, or not bytes")
        worker, id, made, served, spans, omitted, _, _, hops = json.loads(answer)
        read_spans = [(str(lane), str(name), _time(begin), _time(end)) for lane, name, begin, end in spans]
        rows = [*map(_row, made)], [*map(_row, served)]
        return Notes(str(worker), int(id), *rows, read_spans, int(omitted), hops=[*map(_hop, hops)])


def _row(read: Sequence[Any]) -> Row:
    id, peer, function, began, ended, outcome, called_at = read
    return int(id), int(peer), str(function), _time(began), _time(ended), str(outcome), _time(called_at)


def _hop(read: Sequence[Any]) -> Hop:
    id, peer, is_sent, number, began, ended = read
    return int(id), int(peer), is_sent is True, int(number), _time(began), _time(ended)


def _time(read: Any) -> float:
    """Validates a time of another worker; the JSON parser accepts infinite numbers."""
    if not isinstance(read, int | float) or not math.isfinite(read):
        raise ValueError(f"{abridged(read)} is not a time")
    return float(read)


def _with_clock(notes: Notes, worker: str, timeout: float) -> Notes:
    """Adds the offset of the worker's clock, measured in the shortest of several round trips."""
    if notes.id == current_agent().worker_id:
        return notes
    found: list[tuple[float, float]] = []
    with suppress(RpcdistError):  # it has left; assume that the clocks agree
        for _ in range(NUM_ROUND_TRIPS):
            sent = time.monotonic()
            there = rpc.rpc_sync(worker, _now, timeout=timeout)
            came = time.monotonic()
            with raised_as(SerializationError, "the clock of a worker cannot be read", ValueError):
                found.append((came - sent, (sent + came) / 2 - _time(there)))
    if not found:
        return notes
    shortest, offset_s = min(found)
    return notes._replace(offset_s=offset_s, error_s=shortest / 2)
