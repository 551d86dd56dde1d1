"""The records that a worker makes of its calls: rows of the flight recorder, and spans for OpenTelemetry.

The flight recorder has the last calls that a worker has made and served, and how they ended. A call appends one row to
a queue of a fixed length, in a single step that needs no lock. The row that falls out at the other end gives its memory
to the next one, so the recorder allocates nothing once it is full.

Spans are those of each call at the caller and at the callee, with W3C trace context between them; of backward passes,
with the context in their messages; of streams, collectives, DDP and pipeline stages. Nothing of OpenTelemetry is
imported before somebody asks for spans.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

from rpcdist._counters import OK, EndedCall
from rpcdist.inspection import FunctionTimes
from rpcdist.profile_ranges import operation_taps, span_taps

MAX_TRACEPARENT_CHARS: Final = 64  # version 00 of the W3C's header has 55
_SYSTEM: Final = {"rpc.system.name": "rpcdist"}


class CallSpans:
    """Begins and ends the spans of the calls of a process. Any thread may use it.

    Raises `ImportError` where the package `opentelemetry-api` is missing.

    Args:
        tracer_provider: of OpenTelemetry; None for the global one.
    """

    def __init__(self, tracer_provider: Any) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._context = context
        self._tracer = trace.get_tracer("rpcdist", tracer_provider=tracer_provider)
        self._header = TraceContextTextMapPropagator()

    def begin_made(self, called: str) -> Any:
        """A call is made; its span is a child of the one that is current here."""
        return self._tracer.start_span(called, kind=self._trace.SpanKind.CLIENT, attributes=_SYSTEM)

    def traceparent(self, span: Any) -> str:
        """The W3C header that makes the span of the callee a child of this one; empty for a span that is not kept."""
        carrier: dict[str, str] = {}
        self._header.inject(carrier, self._trace.set_span_in_context(span, self._context.Context()))
        return carrier.get("traceparent", "")

    def begin_served(self, traceparent: str) -> Any:
        """A call has arrived. `traceparent` is its caller's word: a header that is malformed counts as none."""
        carrier = {"traceparent": traceparent} if len(traceparent) <= MAX_TRACEPARENT_CHARS else {}
        parent = self._header.extract(carrier, self._context.Context())
        return self._tracer.start_span("rpc", parent, kind=self._trace.SpanKind.SERVER, attributes=_SYSTEM)

    def end(self, span: Any, called: str, peer: str, outcome: str) -> None:
        if not span.is_recording():
            return
        span.update_name(called)
        span.set_attributes({"rpc.method": called, "rpcdist.peer": peer})
        if outcome != OK:
            error, _, text = outcome.partition(":")
            span.set_attribute("error.type", error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text.strip() or error))
        span.end()

    def attach(self, span: Any) -> Any:
        """Makes a span the current one of this thread or task; returns what `detach` takes."""
        return self._context.attach(self._trace.set_span_in_context(span))

    def detach(self, token: Any) -> None:
        self._context.detach(token)

    # ------------------------------------------------------------ what is no call

    def begin_pass(self, name: str, id: int) -> tuple[str, Callable[[BaseException | None], None]]:
        """A pass, or a step, begins in this process; its span is a child of the one that is current here.

        Returns:
            The W3C header of its span, for the other workers, and what has to be called when the pass is over.
        """
        span = self._tracer.start_span(name, attributes={**_SYSTEM, "rpcdist.pass": id})
        return self.traceparent(span), lambda error: self._end(span, error, None)

    def parts_of_pass(
        self, traceparent: str, parts: Iterable[tuple[str, int, float, float]], name_of: Callable[[int], str]
    ) -> None:
        """A pass is over, with these parts here: kind, peer or -1, begin and end (seconds since the epoch) of each."""
        parent = self._context.Context()
        if len(traceparent) <= MAX_TRACEPARENT_CHARS:
            parent = self._header.extract({"traceparent": traceparent}, parent)
        for kind, peer, began_s, ended_s in parts:
            attributes = {**_SYSTEM, "rpcdist.peer": name_of(peer)} if peer >= 0 else _SYSTEM
            self._whole(f"backward {kind}", attributes, parent, began_s)(ended_s, None)

    def on_span(self, lane: str, name: str, began_s: float, ended_s: float) -> None:
        """Something that DDP, a pipeline or the reader of a stream has done; see `span_taps`."""
        shift_s = time.time() - time.monotonic()
        self._whole(lane, {**_SYSTEM, "rpcdist.detail": name}, None, began_s + shift_s)(ended_s + shift_s, None)

    def on_operation(self, group: str, operation: str) -> Callable[[float, float, BaseException | None], None]:
        """An operation of a process group begins; see `operation_taps`."""
        parent = self._context.get_current()
        attributes = {**_SYSTEM, "rpcdist.group": group, "rpcdist.operation": operation}

        def ended(began_s: float, ended_s: float, error: BaseException | None) -> None:
            self._whole(operation, attributes, parent, began_s)(ended_s, error)

        return ended

    def _whole(
        self, name: str, attributes: dict[str, str], parent: Any, began_s: float
    ) -> Callable[[float, BaseException | None], None]:
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=int(began_s * 1e9))
        return lambda ended_s, error: self._end(span, error, int(ended_s * 1e9))

    def _end(self, span: Any, error: BaseException | None, at_ns: int | None) -> None:
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
        span.end(at_ns)


exporter: CallSpans | None = None
"""None until the program asks for spans."""


def export(spans: CallSpans | None) -> None:
    """Has spans go there from now on, and no longer where they went before; None for nowhere."""
    global exporter
    if exporter is not None:
        span_taps.remove(exporter.on_span)
        operation_taps.remove(exporter.on_operation)
    exporter = spans
    if spans is not None:
        span_taps.append(spans.on_span)
        operation_taps.append(spans.on_operation)


MAX_NAME_CHARS: Final = 500

Row = EndedCall


class RecordedCall(NamedTuple):
    """A call that has ended: a row, and whether the call was served here; otherwise it was made here."""

    id: int
    peer: int
    function: str
    began: float
    ended: float
    outcome: str
    is_served: bool


def _times_of(function: str, served: bool, calls: list[RecordedCall]) -> FunctionTimes:
    times_s = [call.ended - call.began for call in calls]
    failed = sum(call.outcome != OK for call in calls)
    return FunctionTimes(function, served, len(calls), failed, median(times_s), max(times_s))


class EndedCalls:
    """Those that are told of each call that has ended: the recorder, metrics, traces. Any thread may call any method.

    Args:
        recorder: takes the rows, if there is one.

    Attributes:
        note: takes a row; None if nobody wants to be told.
    """

    __slots__ = ("_listeners", "_lock", "note")

    def __init__(self, recorder: Callable[[Row], object] | None) -> None:
        self._listeners = [] if recorder is None else [recorder]
        self._lock = threading.Lock()
        self.note = recorder

    def add(self, listener: Callable[[Row], object]) -> Callable[[], None]:
        """Has a function called with the row of each call; returns what ends that."""
        with self._lock:
            self._listeners.append(listener)
            self._set()
        return partial(self._remove, listener)

    def _remove(self, listener: Callable[[Row], object]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self._set()

    def _set(self) -> None:
        listeners = tuple(self._listeners)

        def tell_all(row: Row) -> None:
            for listener in listeners:
                listener(row)

        self.note = tell_all if len(listeners) > 1 else listeners[0] if listeners else None


class CallRecorder:
    """One per agent; any thread may write, and any may read.

    Args:
        size: how many calls are remembered, of those made and of those served.

    Attributes:
        made: takes the row of a call that was made here and has ended.
        served: the same of a call that was served here.
    """

    def __init__(self, size: int) -> None:
        self._made: deque[Row] = deque(maxlen=size)
        self._served: deque[Row] = deque(maxlen=size)
        self.made: Callable[[Row], None] = self._made.append
        self.served: Callable[[Row], None] = self._served.append

    def times(self, most: int) -> tuple[FunctionTimes, ...]:
        """How long the calls took, for each function; the functions with the most calls."""
        found: dict[tuple[str, bool], list[RecordedCall]] = {}
        for call in self:
            found.setdefault((call.function, call.is_served), []).append(call)
        largest = sorted(found.items(), key=lambda item: -len(item[1]))[:most]
        return tuple(_times_of(function[:MAX_NAME_CHARS], served, calls) for (function, served), calls in largest)

    def __iter__(self) -> Iterator[RecordedCall]:
        found = [
            RecordedCall(id, peer, str(function), began, ended, outcome, rows is self._served)
            for rows in (self._made, self._served)
            for id, peer, function, began, ended, outcome, _ in rows.copy()
        ]
        return iter(sorted(found, key=lambda call: call.ended))
