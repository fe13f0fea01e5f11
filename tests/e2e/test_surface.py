"""The HTTP surface on real sockets: probes under load, disconnects in every mode, aborts, limits, numbers."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.testing.server import RunningServer

NUM_CHARS = 200_000
LONG = 30_000  # tokens: the mock engine takes seconds for 64 of these at once
SOON_S = 5.0  # what takes milliseconds, with room for a busy machine; what leaks never ends


class Surface:
    """A server, and one warm connection to it: a poll must cost less than what it looks at."""

    def __init__(self, running: RunningServer) -> None:
        self.url = running.url
        self.http = httpx.Client(base_url=running.url, timeout=30)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def load(self) -> dict[str, Any]:
        load: dict[str, Any] = self.get("/v1/load").json()
        return load

    def wait_until_idle(self, seconds: float) -> None:
        self.wait_for(lambda load: not (load["running"] or load["waiting"] or load["queued_tokens"]), seconds)

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 10) -> None:
        until = time.monotonic() + seconds
        while not condition(load := self.load()):
            assert time.monotonic() < until, load
            time.sleep(0.01)

    def wait_for_numbers(self) -> None:
        """Until the engine has published its numbers once more."""
        since = time.monotonic()
        self.wait_for(lambda load: load["ranks"][0]["heartbeat_age_s"] < time.monotonic() - since)

    def metric(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def open(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A socket with a request on its way; closing it is what a vanished client looks like."""
        url = urlsplit(self.url)
        connection = socket.create_connection((url.hostname, url.port), timeout=60)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection


@pytest.fixture(scope="module")
def server() -> Iterator[Surface]:
    with RunningServer(["--mock-engine", "--mock-step-delay", "0.002", "--max-body-bytes", "3000000"]) as running:
        surface = Surface(running)
        yield surface
        surface.http.close()


def worst_probe_s(server: Surface, is_over: Callable[[], bool]) -> float:
    worst = 0.0
    while not is_over():
        begin = time.perf_counter()
        assert server.get("/livez").status_code == 200
        worst = max(worst, time.perf_counter() - begin)
        time.sleep(0.002)
    return worst


def test_livez_answers_while_ten_prompts_of_200_000_characters_arrive(server: Surface) -> None:
    """The worst of many probes on a warm connection. What this machine delays an idle server's answer is not
    counted, and a busy machine gets three tries."""
    words = "many words of a long text, 123 of them; "
    text = (words * (NUM_CHARS // len(words) + 1))[:NUM_CHARS]
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"prompt": text, "max_tokens": 1}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": text}], "max_tokens": 1}, "/v1/chat/completions"),
    ]
    excess_s = []
    for _ in range(3):
        until = time.monotonic() + 0.5
        idle = worst_probe_s(server, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        connections = [server.open(*bodies[number % 2]) for number in range(10)]
        waiting = set(connections)

        def all_answered(waiting: set[socket.socket] = waiting) -> bool:
            for connection in select.select(waiting, [], [], 0)[0] if waiting else []:
                assert connection.recv(12) == b"HTTP/1.1 400", "longer than the context: refused, after tokenising"
                waiting.remove(connection)
            return not waiting

        excess_s.append(worst_probe_s(server, all_answered) - idle)
        for connection in connections:
            connection.close()
        if excess_s[-1] < 0.1:
            break
    assert min(excess_s) < 0.1, excess_s


@pytest.mark.parametrize("stream", [False, True])
def test_a_vanished_client_s_request_ends(server: Surface, stream: bool) -> None:
    """In both modes, every choice, and the engine computes no more of it."""
    server.wait_until_idle(5)
    aborts = server.metric("headrace:aborts_total", reason="disconnect")
    body = {"prompt": "x", "max_tokens": LONG, "stream": stream, "n": 64}
    connection = server.open(body)
    if stream:
        assert connection.recv(100)
    server.wait_for(lambda load: load["running"] == 64)
    connection.close()
    server.wait_until_idle(SOON_S)
    assert server.metric("headrace:aborts_total", reason="disconnect") == aborts + 64
    generated = server.metric("headrace:generation_tokens_total")
    time.sleep(0.1)
    assert server.metric("headrace:generation_tokens_total") == generated


def test_clients_that_vanish_from_the_queue_never_run(server: Surface) -> None:
    server.wait_until_idle(5)
    running = server.open({"prompt": "x", "max_tokens": LONG, "n": 64})
    server.wait_for(lambda load: load["running"] == 64)
    queued = [server.open({"prompt": "y", "max_tokens": LONG, "stream": bool(n % 2)}) for n in range(10)]
    server.wait_for(lambda load: load["waiting"] == 10)
    for connection in queued:
        connection.close()
    server.wait_for(lambda load: load["waiting"] == 0, SOON_S)
    running.close()
    server.wait_until_idle(SOON_S)


def test_abort_by_each_of_its_names_and_all(server: Surface) -> None:

    def abort(**body: Any) -> int:
        reply = server.http.post("/v1/control/abort", json=body).json()
        assert reply["state"] == "succeeded"
        return int(reply["aborted"])

    replies: list[httpx.Response] = []

    def post(number: int) -> None:
        body = {"prompt": "x", "max_tokens": LONG, "n": 16, "stream": number == 3}
        headers = {"X-Request-Id": f"mine-{number}"}
        replies.append(httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60))

    server.wait_until_idle(5)
    threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda load: load["running"] == 64)
    assert abort(request_ids=["mine-0"]) == 16
    assert abort(request_ids=["cmpl-mine-1", "unknown"]) == 16
    assert abort(request_ids=["cmpl-mine-1"]) == 0
    assert abort(all=True) == 32
    assert abort(all=True) == 0
    for thread in threads:
        thread.join(10)
    assert server.metric("headrace:aborts_total", reason="control") == 64
    assert len(replies) == 4
    for reply in replies:  # each with what it had
        assert reply.status_code == 200
        assert reply.text.count('"finish_reason":"abort"') == 16
        if reply.text.startswith("data:"):
            assert reply.text.endswith("data: [DONE]\n\n")
        else:
            assert all(choice["text"] for choice in reply.json()["choices"])
    server.wait_until_idle(SOON_S)


def test_probes_and_documents(server: Surface) -> None:
    for path in ("/livez", "/readyz", "/health", "/health_generate", "/ping", "/version", "/v1/load", "/docs"):
        assert server.get(path).status_code == 200, path
    schema = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/control/abort", "/tokenize"} <= set(schema["paths"])


def test_bodies_over_the_limit(server: Surface) -> None:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        response = client.post("/v1/completions", json={"prompt": "x" * 4_000_000})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")

        def chunks() -> Iterator[bytes]:
            for _ in range(400):
                yield b"x" * 10_000

        response = client.post("/v1/completions", content=chunks())
        assert response.status_code == 413
        assert client.get("/livez").status_code == 200


def test_errors_of_the_protocol_have_the_same_body(server: Surface) -> None:
    for response in (server.get("/nothing"), server.get("/v1/completions"), httpx.post(server.url + "/tokenize")):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]


def test_counters_equal_what_was_asked(server: Surface) -> None:
    before = {
        name: server.metric(f"headrace:{name}")
        for name in (
            "request_success_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_params_n_count",
        )
    }
    with httpx.Client(base_url=server.url) as client:
        for _ in range(50):
            assert client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "n": 2}).status_code == 200
    server.wait_until_idle(SOON_S)
    server.wait_for_numbers()
    expected = {
        "request_success_total": 100,
        "generation_tokens_total": 400,
        "request_params_n_count": 50,
        "prompt_tokens_total": 150,
    }
    after = {name: server.metric(f"headrace:{name}") - before[name] for name in expected}
    assert after == expected
    assert server.metric("headrace:time_to_first_token_seconds_count") >= 50
    assert server.metric("headrace:event_loop_lag_seconds_count") > 0
