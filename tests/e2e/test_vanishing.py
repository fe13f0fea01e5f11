"""Clients that vanish, by the hundred and beside a long prefill: the server goes on and keeps nothing of them."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.testing.processes import eventually
from headrace.testing.server import RunningServer

MODULES = ("headrace.engine.process", "headrace.server.process")
LONG = 30_000


def open_stream(url: str, **body: object) -> socket.socket:
    """Closing it is what a vanished client looks like."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=30)
    content = msgspec.json.encode({"stream": True, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def is_idle(server: RunningServer) -> bool:
    load = server.get("/v1/load").json()
    return not (load["running"] or load["waiting"] or load["queued_tokens"])


def test_a_stream_that_is_left_during_a_long_prefill_blocks_nothing() -> None:
    """Health answers, others are served, and SIGTERM ends the process."""
    options = ["--mock-engine", "--mock-step-delay", "0.05", "--max-num-batched-tokens", "1024", "--drain-timeout", "1"]
    with RunningServer(options) as server:
        left = open_stream(server.url, prompt="x", max_tokens=LONG)
        assert left.recv(100)
        prefilling = open_stream(server.url, prompt=[7] * LONG, max_tokens=LONG)
        eventually(lambda: server.get("/v1/load").json()["running"] == 2, what="the long prompt is computed")
        left.close()
        begin = time.perf_counter()
        for path in ("/livez", "/health", "/readyz"):
            assert server.get(path).status_code == 200
        assert time.perf_counter() - begin < 1.0
        eventually(lambda: server.get("/v1/load").json()["running"] == 1, what="the one that was left has gone")
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "y", "max_tokens": 1}, timeout=20.0)
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        assert server.terminate(10.0) == 0
        prefilling.close()


def test_a_thousand_streams_that_are_left_leave_nothing() -> None:
    """No drift in slots, blocks, queue or descriptors; the next requests are as quick as the first."""
    with RunningServer(["--mock-engine", "--max-num-seqs", "16"]) as server:

        def leave(count: int) -> None:
            for start in range(0, count, 50):
                streams = [open_stream(server.url, prompt="left", max_tokens=LONG) for _ in range(50)]
                for number, stream in enumerate(streams):
                    if number % 5 == 0 and start % 100 == 0:
                        stream.recv(10)  # some have begun, the others wait in the queue
                    stream.close()

        def num_fds() -> list[int]:
            return [server.children(module)[0].num_fds() for module in MODULES]

        leave(100)
        eventually(lambda: is_idle(server), what="all of the first have gone")
        first, blocks = num_fds(), server.get("/v1/load").json()["free_blocks"]
        leave(900)
        eventually(lambda: is_idle(server), what="all have gone")
        with httpx.Client(base_url=server.url, timeout=10.0) as client:
            for _ in range(100):
                reply = client.post("/v1/completions", json={"prompt": "left", "max_tokens": 3})
                assert reply.json()["choices"][0]["text"] == "lef"
        eventually(lambda: server.get("/v1/load").json()["free_blocks"] == blocks, what="all blocks are free")
        eventually(
            lambda: max(b - a for a, b in zip(first, num_fds(), strict=True)) <= 2, what="few descriptors are open"
        )
