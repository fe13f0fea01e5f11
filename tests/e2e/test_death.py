"""Real processes die, hang and are stopped: every stream hears of it, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx

from headrace.testing.processes import all_gone, eventually, family
from headrace.testing.server import RunningServer
from headrace.testing.stream_reader import begin_streams

ENGINE = "headrace.engine.process"
FRONT_END = "headrace.server.process"
MOCK = ("--mock-engine", "--mock-step-delay", "0.002", "--drain-timeout", "1")
LONG = 30_000  # tokens: the mock engine takes seconds for several of these
KEY = "secret-key-of-a-user"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_killed_engine_ends_every_stream_and_the_server() -> None:
    with RunningServer([*MOCK, "--api-servers", "2", "--port", free_port()]) as server:
        children = family(server)
        streams = begin_streams(server.url, 6, max_tokens=LONG)
        killed_s = time.monotonic()
        os.kill(server.children(ENGINE)[0].pid, signal.SIGKILL)
        for stream in streams:
            assert stream.has_ended.wait(2.0), "an open stream heard nothing for 2 s"
            assert stream.error is not None
            assert (stream.error["type"], stream.error["code"]) == ("unavailable", "engine_dead")
            assert stream.is_done
            assert not stream.is_cut
        assert server.wait(10.0) == 1
        assert time.monotonic() - killed_s < 10
        assert all_gone(children)
        assert "Traceback" not in "".join(server.output)


def test_a_killed_engine_takes_even_a_front_end_that_hangs_with_it() -> None:
    with RunningServer([*MOCK]) as server:
        children = family(server)
        os.kill(server.children(FRONT_END)[0].pid, signal.SIGSTOP)
        os.kill(server.children(ENGINE)[0].pid, signal.SIGKILL)
        assert server.wait(10.0) == 1
        assert all_gone(children)


def test_a_killed_front_end_is_restarted_and_keys_stay_secret() -> None:
    with RunningServer([*MOCK, "--api-key", KEY]) as server:
        streams = begin_streams(server.url, 4, max_tokens=LONG, api_key=KEY)
        (front_end,) = server.children(FRONT_END)
        front_end.kill()
        # The socket outlives the process: this connection waits in the kernel for the next one.
        begin_streams(server.url, 1, max_tokens=LONG, api_key=KEY)
        assert all(stream.has_ended.wait(2.0) and stream.is_cut for stream in streams)
        assert server.children(FRONT_END)[0].pid != front_end.pid
        eventually(lambda: server.get("/readyz").status_code == 200, 5.0)
        eventually(lambda: server.get("/v1/load").json()["running"] <= 1, 5.0)
        assert not any(KEY in " ".join(child.cmdline()) for child in family(server))
        server.terminate()
        assert KEY not in "".join(server.output)


def test_a_stopped_engine_makes_readyz_503_until_it_goes_on_and_children_follow_a_killed_supervisor() -> None:
    options = [*MOCK, "--heartbeat-timeout", "1.5", "--api-servers", "2", "--port", free_port()]
    with RunningServer(options) as server:
        children = family(server)
        assert len(children) == 3
        engine = server.children(ENGINE)[0]
        eventually(lambda: server.get("/readyz").status_code == 200, 3.0)
        engine.send_signal(signal.SIGSTOP)
        eventually(lambda: server.get("/readyz").status_code == 503, 3.0)
        assert "engine_stalled" in server.get("/readyz").json()["reasons"]
        assert server.get("/livez").status_code == 200
        engine.send_signal(signal.SIGCONT)
        eventually(lambda: server.get("/readyz").status_code == 200, 3.0)
        begin_streams(server.url, 2, max_tokens=LONG)
        server.process.kill()
        eventually(lambda: all_gone(children), 5.0)


def test_a_step_that_never_ends_ends_the_server_and_shows_where() -> None:
    with RunningServer(["--mock-engine", "--mock-step-delay", "60", "--hang-timeout", "2"]) as server:
        children = family(server)
        begun_s = time.monotonic()
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=30.0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
        assert 2 < time.monotonic() - begun_s < 20
        assert server.wait(10.0) == 1
        assert all_gone(children)
        output = "".join(server.output)
        assert re.search(r"the engine hangs \(last heartbeats: rank 0 [2-9] s ago\)", output)
        assert "most recent call first" in output
        assert "in step" in output, "the stack of the step"


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "serve", *MOCK, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def test_what_cannot_start_says_so_in_one_line() -> None:
    with RunningServer([*MOCK]) as server:
        used = serve("--port", server.url.rsplit(":", 1)[1])
    assert used.returncode == 1
    assert "the port is in use" in used.stderr
    assert len(used.stderr.splitlines()) == 1
    starved = serve("--port", "0", "--kv-cache-memory", "1KiB")
    assert starved.returncode == 1
    assert len(starved.stderr.splitlines()) == 1, starved.stderr
    assert starved.stderr.startswith("headrace: ")
