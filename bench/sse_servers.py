"""How many streamed events per second does an HTTP server carry in one process: uvicorn or Granian, asyncio or uvloop?

Decides which server the front end stands on (docs/log.md). Each case is one server process with a bare ASGI application
that streams `--events` events to each of `--streams` connections, read by raw sockets in this process; cases alternate.

    python bench/sse_servers.py --streams 64 --events 500 --rounds 3       (needs: pip install granian)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import psutil

EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
)
CASES = ("uvicorn-asyncio", "uvicorn-uvloop", "granian-asyncio", "granian-uvloop")


async def app(scope, receive, send):  # type: ignore[no-untyped-def]
    """Streams as a front end does: one send per event, and the loop gets its turn after each."""
    if scope["type"] != "http":
        return
    num_events = int(scope["path"].rsplit("/", 1)[-1] or 0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(num_events):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def command(case: str, port: int) -> list[str]:
    server, loop = case.split("-")
    if server == "uvicorn":
        options = ["--loop", loop, "--http", "httptools", "--port", str(port), "--log-level", "error"]
        return [sys.executable, "-m", "uvicorn", "sse_servers:app", *options]
    options = ["--interface", "asgi", "--loop", loop, "--port", str(port), "--workers", "1", "--no-access-log"]
    return [sys.executable, "-m", "granian", "--log-level", "error", *options, "sse_servers:app"]


async def read_stream(port: int, num_events: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{num_events} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    num_bytes = 0
    while chunk := await reader.read(1 << 16):
        num_bytes += len(chunk)
    writer.close()
    return num_bytes


async def measure(port: int, num_streams: int, num_events: int) -> float:
    await read_stream(port, 10)
    start = time.perf_counter()
    sizes = await asyncio.gather(*(read_stream(port, num_events) for _ in range(num_streams)))
    elapsed = time.perf_counter() - start
    if min(sizes) < num_events * len(EVENT):
        raise SystemExit("a stream ended early")
    return num_streams * num_events / elapsed


def cpu_seconds(pid: int) -> float:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def run_case(case: str, num_streams: int, num_events: int) -> tuple[float, float]:
    """Events per second, and CPU microseconds of the server (all its threads) per event."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        command(case, port), cwd=os.path.dirname(os.path.abspath(__file__)), start_new_session=True
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        cpu_before = cpu_seconds(process.pid)
        rate = asyncio.run(measure(port, num_streams, num_events))
        return rate, (cpu_seconds(process.pid) - cpu_before) / (num_streams * num_events) * 1e6
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for case in CASES:
            results[case].append(run_case(case, args.streams, args.events))
    for case, pairs in results.items():
        rates, costs = zip(*pairs, strict=True)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        cost = statistics.median(costs)
        print(f"{case:16} {statistics.median(rates):9,.0f} events/s ({spread}), {cost:5.1f} CPU µs per event")


if __name__ == "__main__":
    main()
