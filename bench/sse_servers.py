"""How many streamed events per second does an HTTP server carry in one process: uvicorn or Granian, on which loop?

Decides which server the front end stands on (docs/log.md), and is the limit that bench/frontend.py compares it with.
Each case is one server process with a bare ASGI application that streams events without end; cases take turns. The
server has one core, the reading process another.

    python -m bench.sse_servers --streams 1024 --rounds 3            (Granian's cases need: pip install granian rloop)
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from bench.sse_load import Count, Load, run_load

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"echo","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CASES = ("uvicorn-asyncio", "uvicorn-uvloop", "granian-asyncio", "granian-uvloop", "granian-rloop")


async def app(scope, receive, send):  # type: ignore[no-untyped-def]
    """Streams as a front end does: one send per event, and the loop gets its turn after each."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    while True:
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)


def command(case: str, port: int) -> list[str]:
    server, loop = case.split("-")
    if server == "uvicorn":
        options = ["--loop", loop, "--http", "httptools", "--port", str(port), "--log-level", "critical"]
        return [sys.executable, "-m", "uvicorn", "bench.sse_servers:app", *options]
    options = ["--interface", "asgi", "--loop", loop, "--port", str(port), "--workers", "1", "--no-access-log"]
    return [sys.executable, "-m", "granian", "--log-level", "critical", *options, "bench.sse_servers:app"]


@contextmanager
def running(case: str, core: int | None) -> Iterator[tuple[int, int]]:
    """The port, and the process that serves it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(command(case, port), cwd=root, start_new_session=True)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        serving = [
            child for child in psutil.Process(process.pid).children() if "tracker" not in " ".join(child.cmdline())
        ]
        pid = serving[-1].pid if serving else process.pid
        pin(pid, core)
        yield port, pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pin(pid: int, core: int | None) -> None:
    """All threads of a process, and those that they will start."""
    for thread in psutil.Process(pid).threads() if core is not None else ():
        os.sched_setaffinity(thread.id, {core})


def measure(case: str, num_streams: int, seconds: float, cores: tuple[int, int] | None) -> Count:
    server_core, core = cores or (None, None)
    with running(case, server_core) as (port, pid):
        load = Load(host="127.0.0.1", port=port, path="/", body="", num_streams=num_streams, seconds=seconds, core=core,
                    watched_pid=pid)  # fmt: skip
        return run_load(load)


def two_cores() -> tuple[int, int] | None:
    """For the server, and for all else; None on a machine with one."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1024, metavar="N")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    args = parser.parse_args()
    cases = [case for case in CASES if all(map(importlib.util.find_spec, case.split("-")))]
    results: dict[str, list[Count]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            results[case].append(measure(case, args.streams, args.seconds, two_cores()))
    for case, counts in results.items():
        rates = [count.frames_per_s for count in counts]
        cost = statistics.median(count.server_cpu_share / count.frames_per_s * 1e6 for count in counts)
        reader = statistics.median(count.cpu_share for count in counts)
        print(f"{case:16} {statistics.median(rates):9,.0f} events/s ({min(rates):,.0f} to {max(rates):,.0f}), "
              f"{cost:5.1f} CPU us per event; reader {reader:.0%} of its core")  # fmt: skip


if __name__ == "__main__":
    main()
