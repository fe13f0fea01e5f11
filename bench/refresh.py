"""What new weights cost a server that generates: seconds by source, the longest gap of a stream, how fast it pauses.

    python bench/refresh.py --model smollm2 --rounds 5

A stream runs all the time (greedy, one token a step). Each round refreshes all weights from the model's file, and as
bfloat16 from shared memory and in an HTTP body, staged, with the stream's KV kept. "copy" is the time that this machine
needs to copy as many bytes in memory. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np

from headrace.kernels.native.packer import to_bfloat16
from headrace.testing.server import RunningServer
from headrace.testing.shared_tensors import SharedTensors
from headrace.weights.gguf import GGUFFile
from headrace.weights.hub import resolve_model

COPIED = 1 << 28  # bytes


class Watcher(threading.Thread):
    """Reads one endless stream and notes when its chunks came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.times: list[float] = []
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            body = {"prompt": "Once", "max_tokens": 1500, "temperature": 0, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.times.append(time.perf_counter())
                    if self.is_over:
                        return

    def longest_gap_s(self, start: float, end: float) -> float:
        inside = [at for at in self.times if start <= at <= end]
        return max((b - a for a, b in itertools.pairwise(inside)), default=end - start)


def copy_bytes_per_s() -> float:
    source, target = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return COPIED / statistics.median(seconds)


def bfloat16_tensors(model_file: Any) -> dict[str, np.ndarray]:
    tensors = GGUFFile(model_file).tensors
    return {name: to_bfloat16(tensor.dequantize()) for name, tensor in tensors.items()}


class Refresher:
    """The ways in."""

    def __init__(self, http: httpx.Client, path: str, arrays: Mapping[str, np.ndarray], shared: SharedTensors) -> None:
        self._http = http
        self._manifest = {
            "names": shared.manifest.names,
            "dtypes": shared.manifest.dtypes,
            "shapes": shared.manifest.shapes,
        }
        head = json.dumps({**self._manifest, "kv": "keep", "staged": "always"}).encode()
        self._frame = b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays.values())])
        self.num_bytes = sum(array.nbytes for array in arrays.values())
        self.ways: dict[str, Callable[[], dict[str, Any]]] = {
            "file": lambda: self._refresh({"kind": "path", "path": path}),
            "shared memory": lambda: self._refresh({"kind": "shared_memory", "segment": shared.name, **self._manifest}),
            "HTTP body": self._send,
        }

    def _refresh(self, source: dict[str, Any]) -> dict[str, Any]:
        body = {"source": source, "kv": "keep", "staged": "always"}
        return self._result(self._http.post("/v1/control/refresh_weights", json=body))

    def _send(self) -> dict[str, Any]:
        # In pieces: the client library copies what is left of a long piece after each write.
        view, piece = memoryview(self._frame), 1 << 20
        pieces = (bytes(view[start : start + piece]) for start in range(0, len(view), piece))
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(view))}
        return self._result(self._http.post("/v1/control/refresh_weights", content=pieces, headers=headers))

    def _result(self, response: httpx.Response) -> dict[str, Any]:
        response.raise_for_status()
        result: dict[str, Any] = response.json()["result"][0]
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-stream", action="store_true", help="refresh a server that has nothing else to do")
    args = parser.parse_args()
    model_file = resolve_model(args.model).path
    arrays = bfloat16_tensors(model_file)
    bandwidth = copy_bytes_per_s()
    print(f"copy: {bandwidth / 1e9:.1f} GB/s")
    with RunningServer(["--model", args.model]) as server, SharedTensors(arrays) as shared:
        http = httpx.Client(base_url=server.url, timeout=120)
        refresher = Refresher(http, str(model_file), arrays, shared)
        watcher = Watcher(server.url)
        if not args.no_stream:
            watcher.start()
        time.sleep(1.0)
        for name, way in refresher.ways.items():
            report(name, way, args.rounds, watcher, bandwidth)
        if not args.no_stream:
            pauses(http, watcher, args.rounds)
        watcher.is_over = True


def report(name: str, way: Callable[[], dict[str, Any]], rounds: int, watcher: Watcher, bandwidth: float) -> None:
    walls, packs, gaps, stalls, num_bytes = [], [], [], [], 0
    for _ in range(rounds):
        begin = time.perf_counter()
        result = way()
        end = time.perf_counter()
        walls.append(end - begin)
        packs.append(result["pack_s"])
        stalls.append(result["stall_s"])
        gaps.append(watcher.longest_gap_s(begin, end) if watcher.is_alive() else 0.0)
        num_bytes = result["num_bytes"]
        time.sleep(0.3)
    wall, pack, stall, gap = (statistics.median(seconds) for seconds in (walls, packs, stalls, gaps))
    goal = 1.5 * num_bytes / bandwidth + 0.1
    print(
        f"{name}: {num_bytes / 1e6:.0f} MB in {wall:.3f} s, packing {pack:.3f} s and all else {wall - pack:.3f} s"
        f" (1.5 x copy + 0.1 s is {goal:.3f} s); commit {1e3 * stall:.1f} ms, longest gap {1e3 * gap:.0f} ms"
    )


def pauses(http: httpx.Client, watcher: Watcher, rounds: int) -> None:
    steps = [b - a for a, b in itertools.pairwise(watcher.times[-400:])]
    seconds = []
    for _ in range(4 * rounds):
        begin = time.perf_counter()
        http.post("/v1/control/pause", json={"mode": "keep"}).raise_for_status()
        seconds.append(time.perf_counter() - begin)
        http.post("/v1/control/resume").raise_for_status()
        time.sleep(0.05)
    print(
        f"pause (keep): median {1e3 * statistics.median(seconds):.1f} ms, worst {1e3 * max(seconds):.1f} ms;"
        f" a step takes {1e3 * statistics.median(steps):.1f} ms"
    )


if __name__ == "__main__":
    main()
