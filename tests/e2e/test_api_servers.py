"""Two front ends on one port are one server: numbers, control, ids, kept responses, and the death of one of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.testing.processes import eventually
from headrace.testing.server import RunningServer

FRONT_END = "headrace.server.process"
LONG = 30_000  # tokens: a minute of the mock engine


class Connection:
    """One connection, which stays with the front end that has accepted it."""

    def __init__(self, server: RunningServer) -> None:
        address = urlsplit(server.url)
        self._http = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
        self._http.connect()
        self._port = self._http.sock.getsockname()[1]

    def belongs_to(self, process: psutil.Process) -> bool:
        return any(found.raddr and found.raddr.port == self._port for found in process.net_connections("tcp"))

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        self._http.request(method, path, None if body is None else json.dumps(body))
        return self._http.getresponse()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        response = self.send(method, path, body)
        return response.status, json.loads(response.read())

    def control(self, operation: str, **arguments: Any) -> Any:
        status, reply = self.ask("POST", f"/v1/control/{operation}", arguments)
        assert status == 200, reply
        return reply["result"][0]

    def close(self) -> None:
        self._http.close()


class Stream:
    """A completion that runs; what it says is read on demand."""

    def __init__(self, connection: Connection, name: str, prompt: str = "abc") -> None:
        body = {"prompt": prompt, "max_tokens": LONG, "stream": True, "request_id": name}
        self._connection = connection
        self._response = connection.send("POST", "/v1/completions", body)
        assert self._response.status == 200
        self.text = ""
        self.read(1)

    def read(self, count: int) -> None:
        """So many more characters. Raises EOFError when the stream ends before that."""
        until = len(self.text) + count
        while len(self.text) < until:
            line = self._response.readline()
            if not line:
                raise EOFError
            if line.startswith(b"data: {"):
                self.text += json.loads(line[6:])["choices"][0]["text"]

    def finish_reason(self) -> str:
        """Reads to the end."""
        events = [json.loads(line[6:]) for line in self._response if line.startswith(b"data: {")]
        return str(events[-1]["choices"][0]["finish_reason"])


Connect = Callable[[int], Connection]
"""A new connection to the front end of that number, 0 or 1."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(["--mock-engine", "--mock-step-delay", "0.002", "--api-servers", "2"]) as server:
        yield server


@pytest.fixture
def connect(server: RunningServer) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(number: int) -> Connection:
            process = front_ends(server)[number]
            for _ in range(100):  # the kernel chooses
                connection = Connection(server)
                assert connection.ask("GET", "/livez")[0] == 200  # it was accepted
                if connection.belongs_to(process):
                    stack.callback(connection.close)
                    return connection
                connection.close()
            raise AssertionError("all connections went to the other one")

        yield connect


def front_ends(server: RunningServer) -> list[psutil.Process]:
    """In the order of their numbers."""
    return sorted(server.children(FRONT_END), key=lambda process: process.cmdline()[-1])


def scrape(connection: Connection) -> dict[str, float]:
    """Sums by the samples' names."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(connection.send("GET", "/metrics").read().decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def num_running(connection: Connection) -> int:
    return int(connection.ask("GET", "/v1/load")[1]["running"])


def complete(connection: Connection, **fields: Any) -> dict[str, Any]:
    status, reply = connection.ask("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 3, **fields})
    assert status == 200, reply
    return dict(reply)


def test_any_front_end_counts_for_all_and_the_engine_is_counted_once(connect: Connect) -> None:
    """A thousand requests of eight clients: every tenth has two choices, and every tenth is refused."""
    ends = [connect(index % 2) for index in range(8)]
    before = scrape(ends[0])

    def ask_many(end: Connection) -> None:
        for index in range(125):
            n, temperature = (2 if index % 10 == 1 else 1), (-1 if index % 10 == 2 else 1)
            body = {"prompt": "abc", "max_tokens": 2, "n": n, "temperature": temperature}
            status, reply = end.ask("POST", "/v1/completions", body)
            assert status == (400 if temperature < 0 else 200), reply

    with ThreadPoolExecutor(len(ends)) as threads:
        list(threads.map(ask_many, ends))
    num_served, num_choices = 8 * (125 - 13), 8 * 125
    by_front_ends = {
        "request_success_total": num_choices,
        "request_prompt_tokens_count": num_served,
        "request_prompt_tokens_sum": 3 * num_served,
        "request_params_n_sum": num_choices,
        "e2e_request_latency_seconds_count": num_served,
    }
    by_engine = {"prompt_tokens_total": 3 * num_served, "generation_tokens_total": 2 * num_choices}
    for end in ends[:2]:
        after = scrape(end)
        found = {name: after[f"headrace:{name}"] - before[f"headrace:{name}"] for name in by_front_ends}
        assert found == by_front_ends
        until = time.monotonic() + 5  # the engine publishes a few times a second
        while any(after[f"headrace:{name}"] - before[f"headrace:{name}"] != n for name, n in by_engine.items()):
            assert time.monotonic() < until
            after = scrape(end)


def test_ids_do_not_collide(connect: Connect) -> None:
    """Both front ends count from one, and callers of both may use the same name."""

    def ask(index: int) -> tuple[str, str]:
        prompt = chr(ord("a") + index) * 2 + "!"
        reply = complete(connections[index], prompt=prompt, max_tokens=60, request_id="same")
        return reply["choices"][0]["text"], prompt * 20

    connections = [connect(index % 2) for index in range(12)]
    with ThreadPoolExecutor(12) as threads:
        for text, expected in threads.map(ask, range(12)):
            assert text == expected


def test_an_abort_reaches_requests_of_the_other(connect: Connect) -> None:
    stream, other = Stream(connect(0), "to-abort"), Stream(connect(1), "to-keep")
    asked = connect(1)
    status, reply = asked.ask("POST", "/v1/control/abort", {"request_ids": ["to-abort"]})
    assert (status, reply["aborted"]) == (200, 1)
    assert stream.finish_reason() == "abort"
    other.read(10)
    assert asked.ask("POST", "/v1/control/abort", {"all": True})[1]["aborted"] == 1
    assert other.finish_reason() == "abort"


def test_a_pause_and_a_version_hold_for_both(connect: Connect) -> None:
    one, other = connect(0), connect(1)
    stream = Stream(connect(0), "to-pause")
    assert other.control("pause")["aborted"] == 1
    assert stream.finish_reason() == "abort"
    for end in (one, other):
        assert end.ask("GET", "/health_generate") == (200, {"status": "paused", "reasons": []})
    one.control("resume")
    one.control("set_version", version="step-7")
    for end in (one, other):
        assert end.ask("GET", "/health_generate")[1]["status"] == "ok"
        assert complete(end)["weight_version"] == "step-7"


def test_a_drain_holds_for_both_and_ends_when_the_last_request_has(connect: Connect) -> None:
    one, other = connect(0), connect(1)
    running = Stream(connect(1), "to-drain")
    status, operation = one.ask("POST", "/v1/control/drain", {"wait": False})
    assert status == 202
    for end in (one, other):
        eventually(lambda end=end: end.ask("GET", "/readyz")[0] == 503)
        assert end.ask("GET", "/readyz")[1]["reasons"] == ["draining"]
        status, reply = end.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert (status, reply["error"]["code"]) == (503, "draining")
    running.read(10)
    other.ask("POST", "/v1/control/abort", {"request_ids": ["to-drain"]})
    assert running.finish_reason() == "abort"
    path = f"/v1/control/operations/{operation['id']}"
    eventually(lambda: other.ask("GET", path)[1]["state"] == "succeeded")
    other.control("undrain")
    for end in (one, other):
        assert end.ask("GET", "/readyz")[0] == 200
        complete(end)


def test_a_response_is_found_and_continued_by_the_other(connect: Connect) -> None:
    one, other = connect(0), connect(1)
    status, made = one.ask("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 4})
    assert status == 200
    assert other.ask("GET", f"/v1/responses/{made['id']}") == (200, made)
    body = {"input": "More", "max_output_tokens": 4, "previous_response_id": made["id"]}
    status, more = other.ask("POST", "/v1/responses", body)
    assert status == 200
    assert more["usage"]["input_tokens"] > made["usage"]["input_tokens"] + 4
    assert other.ask("DELETE", f"/v1/responses/{made['id']}")[0] == 200
    assert one.ask("GET", f"/v1/responses/{made['id']}")[0] == 404


def test_one_that_dies_takes_its_own_requests_alone_and_comes_back(server: RunningServer, connect: Connect) -> None:
    other = connect(1)
    complete(connect(0))
    other.control("set_version", version="step-8")
    kept, lost = Stream(connect(1), "kept"), Stream(connect(0), "lost")
    eventually(lambda: num_running(other) == 2)
    before = scrape(other)
    dead, living = front_ends(server)
    dead.kill()
    with pytest.raises((EOFError, OSError, http.client.HTTPException)):
        lost.read(LONG)
    eventually(lambda: num_running(other) == 1)
    kept.read(20)
    eventually(lambda: len(front_ends(server)) == 2)
    new, same = front_ends(server)
    assert (new.pid != dead.pid, same.pid) == (True, living.pid)
    came_back = connect(0)
    assert complete(came_back)["weight_version"] == "step-8", "what others have set before it came"
    for end in (other, came_back):
        after = scrape(end)
        assert after["headrace:request_success_total"] == before["headrace:request_success_total"] + 1
        assert all(after[name] >= value for name, value in before.items() if name.endswith(("_total", "_count")))
    assert came_back.ask("POST", "/v1/control/abort", {"request_ids": ["kept"]})[1]["aborted"] == 1
    assert kept.finish_reason() == "abort"
