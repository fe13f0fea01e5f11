"""`headrace run-batch` as a process: killed in the middle and run again, over a server, and the real model's answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.testing.server import RunningServer

NUM_LINES = 300


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def command(source: Path, output: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "run-batch", "-i", str(source), "-o", str(output), *words]


def run(words: Sequence[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(words, input=stdin, capture_output=True, timeout=50, env=environment)


def read(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def told(body: dict[str, Any]) -> Any:
    """What of a reply is the same each time."""
    return body["model"], body["choices"], body["usage"]["completion_tokens"]


@pytest.fixture
def mock(tmp_path: Path) -> list[str]:
    """The mock engine, from a YAML file that a server could have; its keys do not matter here."""
    config = tmp_path / "mock.yaml"
    config.write_text("mock-engine: true\nmock-step-delay: 0.005\napi-key: secret\nport: 1\n")
    return ["--config", str(config)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """300 requests, and four lines that are none."""
    path = tmp_path / "in.jsonl"
    lines = [
        json.dumps(request(f"r{n}", "/v1/completions", prompt=f"line {n}", max_tokens=12)) for n in range(NUM_LINES)
    ]
    bad = [
        "no json",
        json.dumps(request("r3", "/v1/completions", prompt="again")),
        json.dumps(request("elsewhere", "/v1/images", prompt="x")),
        json.dumps(request("hot", "/v1/completions", prompt="x", temperature=-1)),
    ]
    path.write_text("\n".join([*lines[:5], *bad, *lines[5:]]) + "\n")
    return path


def check(text: bytes) -> None:
    """Each custom_id once, each bad line once."""
    results = read(text)
    counts = Counter(result["custom_id"] for result in results)
    assert counts == {**{f"r{n}": 1 for n in range(NUM_LINES)}, "elsewhere": 1, "hot": 1, None: 2}
    for result in results:
        name = result["custom_id"]
        if name == "hot":
            assert result["response"]["status_code"] == 400
            assert result["response"]["body"]["error"]["param"] == "temperature"
        elif name is None or name == "elsewhere":
            assert result["response"] is None
            assert result["error"]["line"] in (6, 7, 8)
        else:
            assert result["error"] is None
            assert result["response"]["status_code"] == 200
            prompt = f"line {name[1:]}"
            assert result["response"]["body"]["choices"][0]["text"] == (prompt * 2)[:12]


def test_killed_in_the_middle_and_run_again(source: Path, mock: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    words = command(source, output, *mock, "--concurrency", "8")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + 40
    while not output.exists() or output.read_bytes().count(b"\n") < 60:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.communicate()
    first = output.read_bytes()
    num_first = first.count(b"\n")
    assert 60 <= num_first < NUM_LINES
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_0123","custom_id":"r29')  # as if the kill had come in the middle of a line
    done = run(words)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")  # 1: some lines are bad
    assert output.read_bytes().startswith(first[: first.rindex(b"\n") + 1])
    check(output.read_bytes())
    complete = output.read_bytes()
    assert run(words).returncode == 1
    assert output.read_bytes() == complete


def test_stdin_and_stdout(mock: list[str]) -> None:
    lines = [json.dumps(request(name, "/v1/completions", prompt=name, max_tokens=3)) for name in ("one", "two")]
    lines.append(json.dumps(request("vectors", "/v1/embeddings", input=["a", "bc"])))
    done = run(command(Path("-"), Path("-"), *mock), stdin="\n".join(lines).encode())
    assert (done.returncode, done.stderr) == (0, b"")
    bodies = {line["custom_id"]: line["response"]["body"] for line in read(done.stdout)}
    assert [each["index"] for each in bodies.pop("vectors")["data"]] == [0, 1]
    assert {name: body["choices"][0]["text"] for name, body in bodies.items()} == {"one": "one", "two": "two"}


def test_over_a_server(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with RunningServer(["--mock-engine", "--api-key", "secret"]) as server:
        wrong = run(command(source, output, "--url", server.url, "--key", "wrong"))
        assert wrong.returncode == 1
        assert len(wrong.stderr.splitlines()) == 1
        assert output.read_bytes() == b""
        done = run(command(source, output, "--url", server.url, "--key", "secret"))
    assert (done.returncode, done.stderr) == (1, b"")
    check(output.read_bytes())


@pytest.fixture(scope="module")
def real_server(smollm2: Path) -> Iterator[RunningServer]:
    with RunningServer([str(smollm2), "--served-model-name", "m", "--kv-cache-memory", "256MiB"]) as running:
        yield running


@pytest.mark.real_model
def test_a_greedy_answer_is_the_server_s(real_server: RunningServer, smollm2: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    requests = [
        request("chat", "/v1/chat/completions", model="m", messages=question, temperature=0, max_tokens=24),
        request("text", "/v1/completions", prompt="Once upon a time", temperature=0, max_tokens=24, logprobs=2),
    ]
    source.write_text("\n".join(map(json.dumps, requests)))
    words = ["--model", str(smollm2), "--served-model-name", "m", "--kv-cache-memory", "256MiB"]
    done = run(command(source, output, *words))
    assert (done.returncode, done.stderr) == (0, b"")
    results = {line["custom_id"]: line["response"] for line in read(output.read_bytes())}
    for each in requests:
        reply = httpx.post(real_server.url + each["url"], json=each["body"], timeout=60.0)
        assert results[each["custom_id"]]["status_code"] == reply.status_code == 200
        assert told(results[each["custom_id"]]["body"]) == told(reply.json())
