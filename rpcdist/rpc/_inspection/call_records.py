"""The records that a worker makes of its calls: rows of the flight recorder, and spans for OpenTelemetry.

The flight recorder keeps the last calls that a worker has made and served, and how they ended. A call appends one row
to a queue of fixed length, in a single step that needs no lock. A full recorder allocates nothing: the memory of the
row that is dropped serves the next one.

Spans cover each call at the caller and at the callee, with W3C trace context between them; backward passes, with the
context in their messages; streams, collectives, DDP and pipeline stages. OpenTelemetry is imported only when the
program asks for spans.
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
    """Begins and ends the spans of a process, with a tracer provider of OpenTelemetry (None: the global one).

    Any thread may use it. The constructor raises `ImportError` if the package `opentelemetry-api` is missing.
    """

    def __init__(self, tracer_provider: Any) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._context = context
        self._tracer = trace.get_tracer("rpcdist", tracer_provider=tracer_provider)
        self._header = TraceContextTextMapPropagator()

    def begin_made(self, called: str) -> Any:
        """Begins the span of a call that is made here, as a child of the current span."""
        return self._tracer.start_span(called, kind=self._trace.SpanKind.CLIENT, attributes=_SYSTEM)

    def traceparent(self, span: Any) -> str:
        """The W3C header that makes the callee's span a child of this one; empty for a span that is not sampled."""
        carrier: dict[str, str] = {}
        self._header.inject(carrier, self._trace.set_span_in_context(span, self._context.Context()))
        return carrier.get("traceparent", "")

    def begin_served(self, traceparent: str) -> Any:
        """Begins the span of a call that has arrived. A malformed `traceparent` from the caller is ignored."""
        parent = self._parent(traceparent)
        return self._tracer.start_span("rpc", parent, kind=self._trace.SpanKind.SERVER, attributes=_SYSTEM)

    def _parent(self, traceparent: str) -> Any:
        carrier = {"traceparent": traceparent} if len(traceparent) <= MAX_TRACEPARENT_CHARS else {}
        return self._header.extract(carrier, self._context.Context())

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

    # ------------------------------------------------------------ spans of other operations

    def begin_pass(self, name: str, id: int) -> tuple[str, Callable[[BaseException | None], None]]:
        """Begins the span of a backward pass, or of an optimizer's step, as a child of the current span.

        Returns:
            The W3C header of the span, for the other workers, and the function that ends the span.
        """
        span = self._tracer.start_span(name, attributes={**_SYSTEM, "rpcdist.pass": id})
        return self.traceparent(span), lambda error: self._end(span, error, None)

    def parts_of_pass(
        self, traceparent: str, parts: Iterable[tuple[str, int, float, float]], name_of: Callable[[int], str]
    ) -> None:
        """Records the parts of a pass that ran here: kind, peer or -1, begin and end in seconds since the epoch."""
        parent = self._parent(traceparent)
        for kind, peer, began_s, ended_s in parts:
            attributes = {**_SYSTEM, "rpcdist.peer": name_of(peer)} if peer >= 0 else _SYSTEM
            self._whole(f"backward {kind}", attributes, parent, began_s, ended_s)

    def on_span(self, lane: str, name: str, began_s: float, ended_s: float) -> None:
        """Records an action of DDP, a pipeline or the reader of a stream; see `span_taps`."""
        shift_s = time.time() - time.monotonic()
        self._whole(lane, {**_SYSTEM, "rpcdist.detail": name}, None, began_s + shift_s, ended_s + shift_s)

    def on_operation(self, group: str, operation: str) -> Callable[[float, float, BaseException | None], None]:
        """Begins the span of an operation of a process group; see `operation_taps`."""
        attributes = {**_SYSTEM, "rpcdist.group": group, "rpcdist.operation": operation}
        return partial(self._whole, operation, attributes, self._context.get_current())

    def _whole(
        self,
        name: str,
        attributes: dict[str, str],
        parent: Any,
        began_s: float,
        ended_s: float,
        error: BaseException | None = None,
    ) -> None:
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=int(began_s * 1e9))
        self._end(span, error, int(ended_s * 1e9))

    def _end(self, span: Any, error: BaseException | None, at_ns: int | None) -> None:
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(error)))
        span.end(at_ns)


exporter: CallSpans | None = None
"""None until the program asks for spans."""


def export(spans: CallSpans | None) -> None:
    """Sends all later spans to this exporter, in place of the previous one; None turns spans off."""
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
    """The listeners for calls that have ended: the flight recorder, metrics, traces. Thread-safe.

    Attributes:
        note: passes a row to the listeners; None if there are none.
    """

    def __init__(self, recorder: Callable[[Row], object] | None) -> None:
        self._listeners = [] if recorder is None else [recorder]
        self._lock = threading.Lock()
        self.note = recorder

    def add(self, listener: Callable[[Row], object]) -> Callable[[], None]:
        """Registers a function to be called with the row of each call; returns a function that removes it."""
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

        def note_all(row: Row) -> None:
            for listener in listeners:
                listener(row)

        self.note = note_all if len(listeners) > 1 else listeners[0] if listeners else None


class CallRecorder:
    """The flight recorder of an agent: the last `size` calls made, and as many served. Thread-safe.

    Attributes:
        made, served: record the row of a call that has ended.
    """

    def __init__(self, size: int) -> None:
        self._made: deque[Row] = deque(maxlen=size)
        self._served: deque[Row] = deque(maxlen=size)
        self.made: Callable[[Row], None] = self._made.append
        self.served: Callable[[Row], None] = self._served.append

    def times(self, most: int) -> tuple[FunctionTimes, ...]:
        """The durations of the calls by function, for the functions with the most calls."""
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
