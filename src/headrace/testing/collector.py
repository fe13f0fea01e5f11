"""A stand-in for an OpenTelemetry collector: takes spans over OTLP (HTTP, protobuf) and keeps them. For tests alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    name: str
    trace_id: str  # ids in hexadecimal
    span_id: str
    parent_id: str  # empty for a root
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    is_failed: bool


class Collector:
    """`with Collector() as collector: ... collector.wait_for(lambda spans: len(spans) == 3)`."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.paths: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def wait_for(self, is_there: Callable[[list[ReceivedSpan]], bool], seconds: float = 15.0) -> list[ReceivedSpan]:
        until = time.monotonic() + seconds
        while not is_there(list(self.spans)):
            assert time.monotonic() < until, [span.name for span in self.spans]
            time.sleep(0.02)
        return list(self.spans)

    def trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by name, once its `http` span has come: it ends last."""
        spans = self.wait_for(lambda spans: any(s.trace_id == trace_id and s.name == "http" for s in spans))
        return {span.name: span for span in spans if span.trace_id == trace_id}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["content-type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.add(self.path)
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _spans(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_plain(span.attributes),
            resource=_plain(of_resource.resource.attributes),
            is_failed=span.status.code == Status.STATUS_CODE_ERROR,
        )
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
