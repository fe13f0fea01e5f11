"""Reads many server-sent streams at once and counts what comes, for bench/frontend.py and bench/sse_servers.py.

It runs as a process of its own on a core of its own, given a `Load` as JSON, and prints a `Count` as JSON. One epoll
loop reads raw bytes and looks for the texts in them, because an HTTP client would cost more than the server that it
measures. It sweeps a few hundred times a second, so that its share of a core stays small.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import psutil

TEXT = re.compile(rb'"(?:text|content)":"([^"]*)"')
OK = b"HTTP/1.1 200"
READ_BYTES = 1 << 18
SWEEP_S = 0.004
START_TIMEOUT_S = 60.0
BATCH = 64  # connections that are opened before their first answers are read


@dataclass(frozen=True, kw_only=True)
class Load:
    """`body` is posted to `path` by every stream; an empty one makes it a GET."""

    host: str
    port: int
    path: str
    body: str
    num_streams: int
    seconds: float
    num_stalled: int = 0  # streams that are not read any more once they have begun
    core: int | None = None
    watched_pid: int = 0  # the server's process


@dataclass(frozen=True, kw_only=True)
class Count:
    """What came in `seconds`, after all streams had begun. A frame is an event with text in it."""

    seconds: float
    num_streams: int  # that were read
    num_tokens: int
    num_frames: int
    num_bytes: int
    fewest: int  # tokens of the stream that got the fewest, of those that were read
    most: int
    cpu_share: float  # of a core, by the reading process
    server_cpu_share: float  # by the watched process
    server_grown_bytes: int  # of its resident memory

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def frames_per_s(self) -> float:
        return self.num_frames / self.seconds


class Reader:
    """All streams of one load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._waiting: set[int] = set()  # no text yet
        self._tokens: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}  # an event whose end has not come
        self._num_frames = self._num_bytes = 0
        self._buffer = memoryview(bytearray(READ_BYTES))

    def run(self) -> Count:
        self._open()
        for fd in list(self._sockets)[: self._load.num_stalled]:
            self._epoll.unregister(fd)
            del self._tokens[fd]
        before, frames, num_bytes = dict(self._tokens), self._num_frames, self._num_bytes
        watched = psutil.Process(self._load.watched_pid)
        server_cpu, resident = sum(watched.cpu_times()[:2]), watched.memory_info().rss
        begun, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - begun < self._load.seconds:
            self._sweep(SWEEP_S)
            time.sleep(SWEEP_S)
        elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
        server_cpu = sum(watched.cpu_times()[:2]) - server_cpu
        per_stream = [self._tokens[fd] - before[fd] for fd in before]
        for connection in self._sockets.values():
            connection.close()
        return Count(
            seconds=elapsed,
            num_streams=len(per_stream),
            num_tokens=sum(per_stream),
            num_frames=self._num_frames - frames,
            num_bytes=self._num_bytes - num_bytes,
            fewest=min(per_stream),
            most=max(per_stream),
            cpu_share=cpu / elapsed,
            server_cpu_share=server_cpu / elapsed,
            server_grown_bytes=watched.memory_info().rss - resident,
        )

    def _open(self) -> None:
        until = time.perf_counter() + START_TIMEOUT_S
        request = _request(self._load)
        for number in range(self._load.num_streams):
            connection = socket.create_connection((self._load.host, self._load.port))
            connection.sendall(request)
            connection.setblocking(False)
            fd = connection.fileno()
            self._sockets[fd], self._tokens[fd], self._rest[fd] = connection, 0, b""
            self._waiting.add(fd)
            self._epoll.register(fd, select.EPOLLIN)
            if number % BATCH == BATCH - 1:
                self._sweep(0.0)
        while self._waiting:
            self._sweep(0.05)
            if time.perf_counter() > until:
                raise SystemExit(f"{len(self._waiting)} streams have not begun")

    def _sweep(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s, len(self._sockets) or 1):
            size = self._sockets[fd].recv_into(self._buffer)
            if not size:
                raise SystemExit(f"a stream ended early: {self._rest[fd][:300]!r}")
            data = self._rest[fd] + bytes(self._buffer[:size])
            if data.startswith(b"HTTP/") and not data.startswith(OK):
                raise SystemExit(f"a stream was refused: {data[:600]!r}")
            end = data.rfind(b"\n\n") + 2
            if end < 2:
                self._rest[fd] = data
                continue
            self._rest[fd] = data[end:]
            texts = TEXT.findall(data, 0, end)
            self._num_bytes += size
            if num_tokens := len(b"".join(texts)):
                self._num_frames += len(texts)
                self._tokens[fd] += num_tokens
                self._waiting.discard(fd)


def _request(load: Load) -> bytes:
    head = f"{'POST' if load.body else 'GET'} {load.path} HTTP/1.1\r\nHost: bench\r\n"
    if load.body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(load.body.encode())}\r\n"
    return (head + "\r\n" + load.body).encode()


def run_load(load: Load) -> Count:
    """In a process of its own. Raises CalledProcessError when a stream is refused, ends early or does not begin."""
    command = [sys.executable, os.path.abspath(__file__), json.dumps(asdict(load))]
    return Count(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def main() -> None:
    load = Load(**json.loads(sys.argv[1]))
    if load.core is not None:
        os.sched_setaffinity(0, {load.core})
    print(json.dumps(asdict(Reader(load).run())))


if __name__ == "__main__":
    main()
