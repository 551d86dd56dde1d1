"""Spans for OpenTelemetry: of each call at the caller and at the callee, with W3C trace context between them; of
backward passes, with the context in their messages; of streams, collectives, DDP and pipeline stages.

Nothing of OpenTelemetry is imported before somebody asks for spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from rpcdist._counters import OK
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
        """The call has ended."""
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
