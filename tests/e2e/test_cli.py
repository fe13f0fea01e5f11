"""The command line as a user runs it: real processes, a tiny model in them or a mock server behind `--url`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.server import RunningServer


def headrace(*words: str, stdin: str = "", timeout_s: float = 50.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(["--mock-engine", "--api-key", "secret"]) as server:
        yield server


def test_complete_streams_one_completion(tiny_model: Path) -> None:
    words = ["complete", "--model", str(tiny_model), "--max-tokens", "8", "--max-model-len", "64"]
    done = headrace(*words, "hello")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert headrace(*words, stdin="hello").stdout == done.stdout
    assert headrace(*words, "--echo", "hello").stdout == "hello" + done.stdout


def test_chat_answers_piped_lines(tiny_model: Path) -> None:
    words = ["chat", str(tiny_model), "--max-tokens", "4", "--temperature", "0", "--max-model-len", "256"]
    done = headrace(*words, stdin="hi\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")


def test_options_reach_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("max-model-len: 16\n")
    words = ["complete", "--model", str(tiny_model), "--config", str(config), "x" * 20]
    done = headrace(*words)
    assert done.returncode == 1
    assert "16 tokens" in done.stderr
    assert headrace(*words, "--max-model-len", "64", "--max-tokens", "2").returncode == 0


def test_complete_and_chat_over_http(server: RunningServer) -> None:
    access = ["--url", server.url, "--key", "secret", "--max-tokens", "9"]
    done = headrace("complete", "echo me", *access)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("echo me")  # the mock repeats the prompt
    done = headrace("chat", *access, stdin="hi\nho\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 2
    wrong = headrace("complete", "x", "--url", server.url, "--key", "wrong")
    assert wrong.returncode == 1
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", [["--concurrency", "4"], ["--request-rate", "200"]])
def test_bench_serve(how: list[str], server: RunningServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["bench", "serve", "--url", server.url, "--key", "secret", "--num-requests", "12", "--rounds", "2"]
    done = headrace(*words, "--output-tokens", "5", "--endpoint", "chat", "--json", str(report), *how)
    assert done.returncode == 0, done.stderr
    assert "time to first token" in done.stdout
    data = json.loads(report.read_text())
    for row in data["rounds"]:
        assert (row["num_requests"], row["num_failed"], row["output_tokens"]) == (12, 0, 60)
        assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]


def test_bench_serve_reports_failures(server: RunningServer) -> None:
    words = ["bench", "serve", "--url", server.url, "--key", "secret", "--model", "nobody", "--num-requests", "3"]
    done = headrace(*words, "--json", "-")
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["rounds"]
    assert row["num_failed"] == 3
    assert "404" in next(iter(row["failures"]))


def test_bench_offline(tiny_model: Path) -> None:
    words = ["bench", "offline", str(tiny_model), "--batch-sizes", "1,3", "--rounds", "1", "--input-tokens", "8"]
    done = headrace(*words, "--output-tokens", "4", "--json", "-", "--max-model-len", "64")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["batches"]
    assert [row["batch_size"] for row in rows] == [1, 3]
    assert all(row["prefill_tokens_per_s"][0] > 0 and row["decode_tokens_per_s"][0] > 0 for row in rows)


def test_ctrl_c_ends_a_completion_quietly(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "headrace", "complete", "x", "--model", str(tiny_model), "--max-tokens", "1900"]
    process = subprocess.Popen(
        [*command, "--temperature", "1", "--top-k", "50"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)  # it writes, so it is in the middle
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode in (0, 130)  # 0: it was quicker than the signal
    assert b"Traceback" not in stderr
