"""Spans of calls for OpenTelemetry: one at the caller and one at the callee, with W3C trace context between them.

Nothing of OpenTelemetry is imported before somebody asks for spans.
"""

from __future__ import annotations

from typing import Any, Final

from rpcdist._counters import OK

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


exporter: CallSpans | None = None
"""None until the program asks for spans."""
