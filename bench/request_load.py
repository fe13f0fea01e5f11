"""Short requests over kept connections, some aborted at a random moment: the load of bench/frontend.py's last case.

A process of its own on a core of its own, like bench/sse_load.py. An aborted request is a stream whose connection is
closed after its first bytes, or before them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from urllib.parse import urlsplit

NUM_CONNECTIONS = 32
TIMEOUT_S = 60.0
LONG = 20_000  # tokens of a stream that is left


def run_requests(url: str, num_requests: int, aborted: int, core: int | None) -> float:
    """Seconds that they took. One in `aborted` is aborted. Raises CalledProcessError when a reply is not what it should
    be."""
    command = [sys.executable, os.path.abspath(__file__), json.dumps([url, num_requests, aborted, core])]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


class Connections:
    """Each worker has one at a time."""

    def __init__(self, url: str, num_requests: int, aborted: int) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 0)
        self._numbers = iter(range(num_requests))
        self._aborted = aborted
        self._random = random.Random(0)

    async def work(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        for number in self._numbers:
            if number % self._aborted:
                writer.write(_request(prompt=f"request {number}", max_tokens=8))
                await _read_reply(reader)
                continue
            writer.write(_request(prompt=f"request {number}", max_tokens=LONG, stream=True))
            if self._random.random() < 0.8:
                await reader.read(self._random.randrange(1, 4000))
            writer.close()
            reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.close()


def _request(**body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def _read_reply(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a request was refused: {head!r}")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)


async def run(url: str, num_requests: int, aborted: int) -> float:
    begun = time.perf_counter()
    connections = Connections(url, num_requests, aborted)
    await asyncio.gather(*(connections.work() for _ in range(NUM_CONNECTIONS)))
    return time.perf_counter() - begun


def main() -> None:
    url, num_requests, aborted, core = json.loads(sys.argv[1])
    if core is not None:
        os.sched_setaffinity(0, {core})
    print(asyncio.run(run(url, num_requests, aborted)))


if __name__ == "__main__":
    main()
