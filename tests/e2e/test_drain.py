"""SIGTERM: what runs is finished, what comes is refused, then everything goes. A second one does not wait."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from headrace.testing.server import RunningServer
from headrace.testing.stream_reader import StreamReader, begin_streams

MOCK = ("--mock-engine", "--mock-step-delay", "0.002")
LONG = 30_000


def test_sigterm_finishes_what_runs_and_refuses_what_comes() -> None:
    """Over two front ends."""
    with RunningServer([*MOCK, "--api-servers", "2"]) as server:
        idle = httpx.Client(base_url=server.url)
        assert idle.get("/readyz").status_code == 200
        streams = begin_streams(server.url, 20, max_tokens=900)
        server.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 2
        while (ready := idle.get("/readyz")).status_code != 503:
            assert time.monotonic() < until
        assert "draining" in ready.json()["reasons"]
        refused = idle.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert not all(stream.has_ended.is_set() for stream in streams), "too quick to show anything"
        idle.close()
        for stream in streams:
            assert stream.has_ended.wait(20.0)
            assert (stream.finish_reason, stream.error, stream.is_done) == ("length", None, True)
            assert stream.text == "abc" * 300
        assert server.wait(10.0) == 0


def test_after_the_drain_timeout_the_rest_ends_with_an_error() -> None:
    """What the server ends is an error in band."""
    with RunningServer([*MOCK, "--drain-timeout", "0.3"]) as server:
        streams = begin_streams(server.url, 8, max_tokens=LONG)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert stream.has_ended.wait(5.0)
            assert stream.error is not None
            assert (stream.error["code"], stream.is_done) == ("draining", True)
        assert server.wait(10.0) == 0


def test_sigterm_ends_a_server_whose_requests_cannot_end_by_themselves() -> None:
    """Paused, with a stream that is frozen, a request that waits for the resume, and a refresh that is open."""
    with RunningServer([*MOCK, "--drain-timeout", "0.3"]) as server:
        (frozen,) = begin_streams(server.url, 1, max_tokens=LONG)
        for operation, body in (("begin_refresh", {"staged": "always"}), ("pause", {"mode": "keep"})):
            assert httpx.post(f"{server.url}/v1/control/{operation}", json=body).status_code == 200
        held = StreamReader(server.url, max_tokens=1)
        until = time.monotonic() + 5
        while server.get("/v1/load").json()["waiting"] != 1:
            assert time.monotonic() < until
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(8.0) == 0
        assert held.has_ended.wait(5.0)
        assert held.status == 503
        assert frozen.error is not None
        assert (frozen.error["code"], frozen.is_done) == ("draining", True)


def test_a_second_signal_forces() -> None:
    with RunningServer([*MOCK]) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        streams = begin_streams(server.url, 8, max_tokens=LONG)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        forced_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(5.0) == 128 + signal.SIGTERM
        assert time.monotonic() - forced_s < 3
        assert all(stream.has_ended.wait(5.0) for stream in streams)
        assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_server(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "headrace", "serve", *MOCK, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        until = time.monotonic() + 10
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < until
        process.send_signal(number)
        assert process.wait(8.0) == 0
        assert not any(child.is_running() for child in children)
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
