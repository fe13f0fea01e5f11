"""Spans of requests, by OpenTelemetry's SDK: the one module that imports it. `tracing.py` opens it.

    http ─┬─ preprocess ── queue ── prefill ── decode ── postprocess
          └─ control

A request that is not sampled gets no `Trace`, so whoever holds None has nothing to do. Sampling, batching and the
collector's headers are the SDK's own and set by its OTEL_* variables. Times come as this process's monotonic seconds.
The provider is not made the global one, to which FastAPI would add spans of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]
"""None: left out."""


class Trace:
    """One sampled request: its `http` span, and the spans below it. Belongs to the event loop."""

    def __init__(self, tracer: Tracer, span: Span, offset_ns: int) -> None:
        """`offset_ns` makes times since the epoch of monotonic ones."""
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self._offset_ns = offset_ns

    @property
    def trace_parent(self) -> str:
        """Names this request's span, for whoever does work below it."""
        context = self._span.get_span_context()
        ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
        return f"00-{ids}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_given(attributes))

    def child(
        self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None, error: str | None = None
    ) -> None:
        """A span that has ended already. `error`: the code of what it failed with."""
        span = self._tracer.otel.start_span(
            name, self._context, attributes=_given(attributes or {}), start_time=self._ns(start_s)
        )
        _fail(span, error)
        span.end(self._ns(max(start_s, end_s)))

    def end(self, end_s: float, attributes: Attributes, error: str | None = None) -> None:
        self.set(attributes)
        _fail(self._span, error)
        self._span.end(self._ns(end_s))

    def _ns(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9) + self._offset_ns


class Tracer:
    """One per front end."""

    def __init__(self, provider: TracerProvider) -> None:
        self.otel = provider.get_tracer("headrace")
        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, url: str, *, version: str, instance: str) -> Tracer:
        """Sends spans in batches, from a thread of its own, to an OTLP collector (HTTP, protobuf)."""
        own = {"service.name": "headrace", "service.version": version, "service.instance.id": instance}
        resource = Resource(own).merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and its like win
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        return cls(provider)

    def start(self, trace_parent: str | None, trace_state: str | None, start_s: float) -> Trace | None:
        """The trace of a request that has come, below the caller's span if it named one; None if it is not sampled."""
        context = Context()
        if trace_parent is not None:
            carrier = {"traceparent": trace_parent, "tracestate": trace_state or ""}
            context = self._propagator.extract(carrier, context)
        offset_ns = time.time_ns() - time.monotonic_ns()  # one for all spans, or a child might begin before its parent
        start_ns = round(start_s * 1e9) + offset_ns
        span = self.otel.start_span("http", context, SpanKind.SERVER, start_time=start_ns)
        return Trace(self, span, offset_ns) if span.is_recording() else None

    def close(self, timeout_s: float) -> None:
        """Sends what there is left, for so long at most. A collector that does not answer holds up nobody."""
        closing = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        closing.start()
        closing.join(timeout_s)


def _given(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _fail(span: Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR, error))
