"""Trace context as text, spans out of durations, and that none of it is loaded where nobody asked."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from headrace.errors import ConfigError
from headrace.observability.otel import Tracer
from headrace.observability.tracing import check_tracing, checked_trace_parent, trace_id_of, traces_url

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("text", [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-ff"])
def test_what_is_a_trace_parent(text: str) -> None:
    assert checked_trace_parent(text) == text
    assert trace_id_of(text) == TRACE


@pytest.mark.parametrize(
    "text",
    [None, "", "x", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
     f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-01\n", f"00-{TRACE}-{SPAN}"],
)  # fmt: skip
def test_what_is_none(text: str | None) -> None:
    assert checked_trace_parent(text) is None
    assert trace_id_of(text) is None


def test_where_spans_go() -> None:
    assert traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert traces_url("https://example.org/otlp/v1/traces") == "https://example.org/otlp/v1/traces"
    for endpoint in ("collector:4318", "grpc://collector:4317", "http://", "/v1/traces"):
        with pytest.raises(ConfigError):
            traces_url(endpoint)
    check_tracing(None)
    check_tracing("http://collector:4318")


def test_spans_have_the_times_they_were_given() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    received_s, wall_ns = time.monotonic(), time.time_ns()
    trace = Tracer(provider).start(f"00-{TRACE}-{SPAN}-01", "vendor=1", received_s)
    assert trace is not None
    assert trace_id_of(trace.trace_parent) == TRACE
    trace.child("queue", received_s + 1, received_s + 3, {"a": 1, "b": None})
    trace.child("backwards", received_s + 3, received_s + 2, error="because")
    trace.end(received_s + 4, {"c": ["x"]})
    queue, backwards, http = exporter.get_finished_spans()
    assert queue.start_time is not None
    assert queue.end_time is not None
    assert http.context is not None
    assert http.parent is not None
    assert abs(queue.start_time - wall_ns - 1_000_000_000) < 50_000_000
    assert abs(queue.end_time - queue.start_time - 2_000_000_000) < 2000
    assert backwards.start_time == backwards.end_time
    assert (dict(queue.attributes or {}), dict(http.attributes or {})) == ({"a": 1}, {"c": ("x",)})
    assert (queue.status.is_ok, backwards.status.is_ok, http.status.is_ok) == (True, False, True)
    assert http.parent.span_id == int(SPAN, 16)
    assert queue.parent is not None
    assert queue.parent.span_id == http.context.span_id
    assert http.context.trace_state.get("vendor") == "1"


def test_what_is_not_sampled_is_none() -> None:
    tracer = Tracer(TracerProvider())
    assert tracer.start(f"00-{TRACE}-{SPAN}-00", None, 0.0) is None
    assert tracer.start(None, None, 0.0) is not None
    assert Tracer(TracerProvider(sampler=ALWAYS_OFF)).start(None, None, 0.0) is None


def test_nobody_loads_the_sdk_unasked() -> None:
    """FastAPI loads OpenTelemetry's interface; all that costs something is the SDK and the exporter."""
    code = (
        "import sys, headrace.server.process, headrace.engine.process, headrace.cli.serve; "
        "costly = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf', 'requests'); "
        "print([name for name in sys.modules if name.startswith(costly)])"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
