"""A model over several processes loses one of them: every stream hears of it, the server ends, and nothing is left
running, whatever was going on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.kernels import has_native
from headrace.testing.processes import all_gone, eventually, family
from headrace.testing.server import RunningServer
from headrace.testing.stream_reader import begin_streams
from headrace.testing.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not has_native(), reason="ranks need the compiled kernels")
ENGINE = "headrace.engine.process"
WORKER = "headrace.executor.worker_process"
RANKS = ("--tensor-parallel-size", "2", "--enable-expert-parallel", "--threads", "2", "--num-kv-blocks", "4000")
ENDLESS = 15_000  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 96 KB each, so that moving some takes a while where little may move at once."""
    folder = tmp_path_factory.mktemp("tiny") / "moe"
    return write_tiny_model(
        folder, architecture="qwen3_moe", num_experts=32, expert_size=128, hidden_size=64, max_positions=16_384,
        eos_token_id=271,
    )  # fmt: skip


def control(server: RunningServer, operation: str, **arguments: Any) -> dict[str, Any]:
    """Begins an operation that goes on by itself."""
    reply = httpx.post(f"{server.url}/v1/control/{operation}", json={"wait": False, **arguments}, timeout=10.0)
    assert reply.status_code < 300, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def run_state(server: RunningServer) -> str:
    run = server.get("/v1/experts").json()["run"]
    return "" if run is None else str(run["state"])


def begin_moving(server: RunningServer, model: Path) -> None:
    change_places(server, "apply")
    eventually(lambda: run_state(server) == "moving", 5.0)


def change_places(server: RunningServer, action: str) -> None:
    slots = [row[16:] + row[:16] for row in server.get("/v1/experts").json()["slots"]]
    control(server, "rebalance_experts", action=action, slots=slots)


def stage(server: RunningServer, model: Path) -> None:
    change_places(server, "stage")
    eventually(lambda: run_state(server) == "staged", 20.0)


def begin_refresh(server: RunningServer, model: Path) -> None:
    control(server, "begin_refresh", staged="always")
    control(server, "apply_refresh", source={"kind": "path", "path": str(model)})


@pytest.mark.parametrize(
    ("meanwhile", "move_bytes"),
    [(begin_moving, "4KiB"), (stage, "4MiB"), (begin_refresh, "4MiB")],
)
def test_a_killed_worker_ends_every_stream_and_the_server(
    model: Path, meanwhile: Callable[[RunningServer, Path], None], move_bytes: str
) -> None:
    with RunningServer([str(model), *RANKS, "--expert-move-bytes", move_bytes]) as server:
        children = family(server)
        (worker,) = server.children(WORKER)
        streams = begin_streams(server.url, 3, max_tokens=ENDLESS)
        meanwhile(server, model)
        assert not any(stream.has_ended.is_set() for stream in streams)
        killed_s = time.monotonic()
        worker.kill()
        for stream in streams:
            assert stream.has_ended.wait(5.0), "an open stream heard nothing for 5 s"
            assert stream.error is not None
            assert (stream.error["type"], stream.error["code"]) == ("unavailable", "engine_dead")
            assert stream.is_done
        assert server.wait(10.0) == 1
        assert time.monotonic() - killed_s < 10
        assert all_gone(children)
        assert f"rank 1 (process {worker.pid}) has ended with code -9" in "".join(server.output)


def test_an_idle_server_notices(model: Path) -> None:
    with RunningServer([str(model), *RANKS]) as server:
        children = family(server)
        server.children(WORKER)[0].kill()
        assert server.wait(10.0) == 1
        assert all_gone(children)


def test_a_stopped_worker_shows_and_may_go_on(model: Path) -> None:
    """And what hangs does not outlive the server."""
    with RunningServer([str(model), *RANKS, "--heartbeat-timeout", "1.2", "--drain-timeout", "1"]) as server:
        children = family(server)
        (worker,) = server.children(WORKER)
        eventually(lambda: server.get("/readyz").status_code == 200, 3.0)
        (stream,) = begin_streams(server.url, 1, max_tokens=ENDLESS)
        worker.send_signal(signal.SIGSTOP)
        eventually(lambda: server.get("/readyz").status_code == 503, 5.0)
        assert server.get("/livez").status_code == 200
        worker.send_signal(signal.SIGCONT)
        eventually(lambda: server.get("/readyz").status_code == 200, 5.0)
        assert not stream.has_ended.is_set()
        worker.send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        server.wait(20.0)
        eventually(lambda: all_gone(children), 5.0)


def test_workers_follow_a_killed_engine(model: Path) -> None:
    with RunningServer([str(model), *RANKS]) as server:
        children = family(server)
        begin_streams(server.url, 1, max_tokens=ENDLESS)
        os.kill(server.children(ENGINE)[0].pid, signal.SIGKILL)
        assert server.wait(10.0) == 1
        eventually(lambda: all_gone(children), 5.0)


def test_what_cannot_be_loaded_is_one_line(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    command = [sys.executable, "-m", "headrace", "serve", str(tmp_path), "--port", "0", *RANKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("headrace: ")
    assert "model.safetensors" in done.stderr
    uneven = subprocess.run(
        [*command, "--redundant-experts", "3"], capture_output=True, text=True, timeout=30, check=False
    )
    assert uneven.returncode == 1
    assert len(uneven.stderr.splitlines()) == 1, uneven.stderr
