"""Spans as a collector gets them: who is below whom, what they say, for every kind of reply and for what goes wrong."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.testing.collector import Collector, ReceivedSpan
from headrace.testing.server import RunningServer

PHASES = ("preprocess", "queue", "prefill", "decode", "postprocess")
MESSAGES = [{"role": "user", "content": "Hello there"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6}),
    "chat stream": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6, "stream": True}),
    "completion": ("/v1/completions", {"prompt": "Hello there", "max_tokens": 6}),
    "completion stream": ("/v1/completions", {"prompt": "Hello there", "max_tokens": 6, "stream": True}),
}


class Traced:
    """A server that sends its spans to a collector."""

    def __init__(self, running: RunningServer, collector: Collector) -> None:
        self.http = httpx.Client(base_url=running.url, timeout=30)
        self.collector = collector
        self._num_traces = 0

    def caller(self, *, is_sampled: bool = True) -> tuple[str, str, dict[str, str]]:
        """Ids of a trace and of the caller's span in it, and the header that says so."""
        self._num_traces += 1
        trace_id, span_id = f"{self._num_traces:032x}", f"{self._num_traces + 1000:016x}"
        return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{int(is_sampled):02x}"}

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)


@pytest.fixture(scope="module")
def server() -> Iterator[Traced]:
    environment = {name: os.environ.get(name) for name in ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_SERVICE_NAME")}
    os.environ.update(OTEL_BSP_SCHEDULE_DELAY="50", OTEL_SERVICE_NAME="my-model")
    try:
        options = ["--mock-engine", "--mock-step-delay", "0.002", "--api-servers", "2", "--otlp-traces-endpoint"]
        with Collector() as collector, RunningServer([*options, collector.url]) as running:
            traced = Traced(running, collector)
            yield traced
            traced.http.close()
    finally:
        for name, value in environment.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def check_tree(spans: dict[str, ReceivedSpan], parent_id: str) -> ReceivedSpan:
    """All below `http`, which is below its caller and lasts as long as they do."""
    http = spans["http"]
    assert http.parent_id == parent_id
    for name, span in spans.items():
        if name != "http":
            assert span.parent_id == http.span_id, name
            assert http.start_ns <= span.start_ns <= span.end_ns <= http.end_ns, name
    return http


@pytest.mark.parametrize("kind", BODIES)
def test_a_request_and_its_phases(server: Traced, kind: str) -> None:
    trace_id, caller_id, headers = server.caller()
    path, body = BODIES[kind]
    response = server.post(path, body, {**headers, "X-Request-Id": f"mine-{trace_id}"})
    assert response.status_code == 200
    spans = server.collector.trace(trace_id)
    assert set(spans) == {"http", *PHASES}
    http = check_tree(spans, caller_id)
    assert not any(span.is_failed for span in spans.values())
    prompt_tokens = http.attributes["gen_ai.usage.input_tokens"]
    assert prompt_tokens >= len("Hello there")
    assert http.attributes == {
        "http.request.method": "POST",
        "url.path": path,
        "http.response.status_code": 200,
        "headrace.request_id": f"mine-{trace_id}",
        "headrace.internal_id": http.attributes["headrace.internal_id"],
        "gen_ai.response.id": ("chatcmpl-" if "chat" in kind else "cmpl-") + f"mine-{trace_id}",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 6,
        "headrace.cached_tokens": http.attributes["headrace.cached_tokens"],
        "headrace.preemptions": 0,
        "headrace.weights_version": "0",
    }
    assert http.resource["service.name"] == "my-model"
    assert http.resource["service.instance.id"] in ("front-end-0", "front-end-1")
    order = [spans[name] for name in PHASES]
    assert all(before.end_ns <= after.start_ns + 1000 for before, after in itertools.pairwise(order))
    assert spans["decode"].end_ns - spans["decode"].start_ns > 5 * 1_500_000, "five steps of 2 ms"
    assert spans["prefill"].attributes["gen_ai.usage.input_tokens"] == prompt_tokens
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == 6


def test_without_a_caller_it_is_a_root_and_others_are_left_alone(server: Traced) -> None:
    before = len(server.collector.spans)
    for path in ("/livez", "/metrics", "/health"):
        assert server.http.get(path).status_code == 200
    malformed = {"traceparent": "00-" + "0" * 32 + "-" + "1" * 16 + "-01"}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, malformed).status_code == 200
    spans = server.collector.wait_for(lambda spans: len(spans) >= before + 6)[before:]
    assert sorted(span.name for span in spans) == sorted(("http", *PHASES))
    check_tree({span.name: span for span in spans}, "")


def test_what_the_caller_does_not_sample_is_not_sent(server: Traced) -> None:
    unsampled, _, headers = server.caller(is_sampled=False)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers).status_code == 200
    sampled, _, headers = server.caller()
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers)
    server.collector.trace(sampled)
    assert all(span.trace_id != unsampled for span in server.collector.spans)


def test_a_request_that_a_control_operation_aborts(server: Traced) -> None:
    trace_id, caller_id, headers = server.caller()
    control_id, _, control_headers = server.caller()
    body = {"prompt": "x" * 50, "max_tokens": 20_000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers={**headers, "X-Request-Id": "a"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        aborted = server.post("/v1/control/abort", {"request_ids": ["a"]}, control_headers).json()
        assert (aborted["aborted"], aborted["trace_id"], aborted["deadline"]) == (1, control_id, None)
        assert any('"finish_reason":"abort"' in line for line in lines)
    http = check_tree(server.collector.trace(trace_id), caller_id)
    assert http.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert http.attributes["headrace.abort_reason"] == "control"
    assert not http.is_failed
    control = server.collector.trace(control_id)["control"]
    assert control.attributes["headrace.operation.kind"] == "abort"


def test_a_client_that_leaves(server: Traced) -> None:
    trace_id, caller_id, headers = server.caller()
    body = {"prompt": "x" * 50, "max_tokens": 20_000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())
    spans = server.collector.trace(trace_id)
    http = check_tree(spans, caller_id)
    assert set(spans) == {"http", *PHASES}
    assert http.attributes["headrace.abort_reason"] == "disconnect"


def test_requests_that_fail(server: Traced) -> None:
    """Before the engine saw it, for the client's own fault; and at its deadline, in the middle of a stream."""
    trace_id, caller_id, headers = server.caller()
    refused = server.post("/v1/completions", {"prompt": "a", "temperature": -1}, headers)
    assert refused.status_code == 400
    http = check_tree(server.collector.trace(trace_id), caller_id)
    assert (http.attributes["http.response.status_code"], http.attributes["error.type"]) == (400, "invalid_value")
    assert not http.is_failed

    trace_id, caller_id, headers = server.caller()
    body = {"prompt": "x" * 50, "max_tokens": 20_000, "stream": True, "timeout_s": 0.3}
    assert '"code":"deadline_exceeded"' in server.post("/v1/completions", body, headers).text
    http = check_tree(server.collector.trace(trace_id), caller_id)
    assert http.is_failed
    assert (http.attributes["http.response.status_code"], http.attributes["error.type"]) == (200, "deadline_exceeded")
    assert http.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_control_operations(server: Traced) -> None:
    trace_id, caller_id, headers = server.caller()
    done = server.post("/v1/control/set_version", {"version": "step-7"}, headers).json()
    assert done["trace_id"] == trace_id
    assert 0 < done["deadline"] - done["started"] <= 600.1
    assert server.http.get(f"/v1/control/operations/{done['id']}").json() == done
    spans = server.collector.trace(trace_id)
    check_tree(spans, caller_id)
    assert spans["control"].attributes == {
        "headrace.operation.kind": "set_version",
        "headrace.operation.id": done["id"],
        "headrace.operation.state": "succeeded",
        "headrace.weights_version": "step-7",
    }
    assert server.post("/v1/control/set_version", {"version": "0"}).status_code == 200

    trace_id, caller_id, headers = server.caller()
    assert server.post("/update_weights", {"version": "x", "model_path": "/nowhere"}, headers).status_code != 200
    trace_id, caller_id, headers = server.caller()
    failed = server.post("/v1/control/commit_refresh", {}, headers)
    assert failed.status_code == 409
    spans = server.collector.trace(trace_id)
    check_tree(spans, caller_id)
    control = spans["control"]
    assert control.is_failed
    assert control.attributes["headrace.operation.state"] == "failed"
    assert control.attributes["error.type"] == "conflict"
    operations = server.http.get("/v1/control/operations").json()["operations"]
    (kept,) = [operation for operation in operations if operation["trace_id"] == trace_id]
    assert kept["id"] == control.attributes["headrace.operation.id"]


def test_operations_of_dialects_belong_to_their_request(server: Traced) -> None:
    trace_id, caller_id, headers = server.caller()
    assert server.post("/pause_generation", {}, headers).status_code == 200
    spans = server.collector.trace(trace_id)
    check_tree(spans, caller_id)
    assert spans["control"].attributes["headrace.operation.kind"] == "pause"
    assert server.post("/continue_generation", {}).status_code == 200


def test_a_collector_that_does_not_answer_holds_up_nobody() -> None:
    with RunningServer(["--mock-engine", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces"]) as running:
        response = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=10)
        assert response.status_code == 200
        assert running.terminate(timeout_s=8) == 0


@pytest.mark.parametrize(
    ("prelude", "endpoint", "message"),
    [
        ("", "localhost:4318", "is no URL such as http://127.0.0.1:4318/v1/traces"),
        ("sys.modules['opentelemetry.sdk'] = None; ", "http://localhost:4318", "pip install 'headrace[otel]'"),
    ],
)
def test_it_says_why_it_cannot_start(prelude: str, endpoint: str, message: str) -> None:
    code = f"import sys; {prelude}from headrace.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--mock-engine", "--otlp-traces-endpoint", endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
