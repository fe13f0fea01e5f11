"""What one front-end process carries: streamed tokens, readers that stall, long prompts, requests that are aborted.

    python -m bench.frontend            five minutes
    python -m bench.frontend --quick    one minute; `--only streams,stalled,prompts,aborts` for a part

The mock engine serves; nothing but the front end is measured. The front end has the first core to itself; engine,
supervisor and the reading process (bench/sse_load.py) share the second, and the table shows how busy each was, so that
the limit is seen. Servers of one table take turns. It needs Linux, two cores, and quiet.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
from bench import sse_servers
from bench.request_load import run_requests
from bench.sse_load import Count, Load, run_load

from headrace.testing.server import RunningServer
from headrace.weights.hub import cached_alias_path

CASES = ("streams", "stalled", "prompts", "aborts")
CHAT = "/v1/chat/completions"
MAX_TOKENS = 30_000
NUM_CHARS = 200_000
PROMPTS_PER_S = 5
LAG = "headrace:event_loop_lag_seconds_bucket"
ABORTED = 5  # one request of so many
Cores = tuple[int, int] | None


class FrontEndServer(RunningServer):
    """A server with the mock engine, on its cores."""

    def __init__(self, cores: Cores, *options: str, is_pinned: bool = True) -> None:
        """`is_pinned`: the front end has one core, as the streams' cases want it; else both."""
        room = ["--block-size", "256", "--num-kv-blocks", "200000", "--max-queued-requests", "4096"]
        super().__init__(["--mock-engine", "--log-level", "error", *room, *options])
        self.cores = cores
        (self.front_end,) = self.children("headrace.server.process")
        if cores is not None:
            for process in [psutil.Process(self.process.pid), *self.children("headrace")]:
                sse_servers.pin(process.pid, cores[1])
            if is_pinned:
                sse_servers.pin(self.front_end.pid, cores[0])
            else:
                for thread in self.front_end.threads():
                    psutil.Process(thread.id).cpu_affinity(list(cores))

    def stream(self, num_streams: int, seconds: float, num_stalled: int = 0) -> Count:
        address = urlsplit(self.url)
        body = {"messages": [{"role": "user", "content": "abcdefgh"}], "stream": True, "max_tokens": MAX_TOKENS}
        load = Load(
            host=str(address.hostname),
            port=int(address.port or 0),
            path=CHAT,
            body=json.dumps(body),
            num_streams=num_streams,
            seconds=seconds,
            num_stalled=num_stalled,
            core=self.cores and self.cores[1],
            watched_pid=self.front_end.pid,
        )
        count = run_load(load)
        self.wait_idle()
        return count

    def wait_idle(self) -> dict[str, int]:
        """Until all that was left has gone; what /v1/load says then."""
        while True:
            load: dict[str, int] = self.get("/v1/load").json()
            if not (load["running"] or load["waiting"] or load["queued_tokens"]):
                return load
            time.sleep(0.05)


def middle(counts: list[Count], value: Callable[[Count], float]) -> float:
    return statistics.median(map(value, counts))


def streams(cores: Cores, args: argparse.Namespace) -> None:
    """Tokens per second at many streams, beside a bare loop of the same server."""
    n, seconds = args.streams, args.seconds
    options = ("--max-num-seqs", str(n), "--max-num-batched-tokens", str(2 * n), "--mock-step-delay")
    counts: dict[str, list[Count]] = {}
    with ExitStack() as stack:
        servers = {
            f"steps wait {delay_ms} ms": stack.enter_context(FrontEndServer(cores, *options, str(delay_ms / 1000)))
            for delay_ms in (20, 10, 5)
        }
        for _ in range(args.rounds):
            for name, server in servers.items():
                counts.setdefault(name, []).append(server.stream(n, seconds))
            bare = sse_servers.measure("uvicorn-uvloop", n, seconds, cores)
            counts.setdefault("bare uvicorn loop", []).append(bare)
    print(f"\n{n} streams of chat, one front end on one core (medians of {args.rounds} turns of {seconds:g} s)")
    print(f"{'':22} {'tokens/s':>9} {'events/s':>9} {'tokens/event':>13} {'front end':>10} {'us/token':>9}"
          f" {'us/event':>9} {'slowest':>8} {'reader':>7}")  # fmt: skip
    for name, of_case in counts.items():
        share = middle(of_case, lambda c: c.server_cpu_share)
        print(
            f"{name:22} {middle(of_case, lambda c: c.tokens_per_s):9,.0f}"
            f" {middle(of_case, lambda c: c.frames_per_s):9,.0f}"
            f" {middle(of_case, lambda c: c.num_tokens / c.num_frames):13.2f} {share:10.0%}"
            f" {middle(of_case, lambda c: c.server_cpu_share / c.tokens_per_s * 1e6):9.1f}"
            f" {middle(of_case, lambda c: c.server_cpu_share / c.frames_per_s * 1e6):9.1f}"
            f" {middle(of_case, lambda c: c.fewest / (sum_of(c) or 1)):8.0%}"
            f" {middle(of_case, lambda c: c.cpu_share):7.0%}"
        )
    print("slowest: tokens of the stream that got the fewest, of the mean; front end, reader: share of their core")


def sum_of(count: Count) -> float:
    """Tokens of the mean stream."""
    return count.num_tokens / count.num_streams


def stalled(cores: Cores, args: argparse.Namespace) -> None:
    """2,000 streams, with and without one that nobody reads."""
    n = 2 * args.streams if args.quick else 2000
    options = ("--max-num-seqs", str(n), "--max-num-batched-tokens", str(2 * n), "--mock-step-delay", "0.05")
    counts: dict[int, list[Count]] = {0: [], 1: []}
    with FrontEndServer(cores, *options) as server:
        server.stream(n, 1.0)
        for number in range(args.rounds):
            for num_stalled in (0, 1) if number % 2 else (1, 0):
                counts[num_stalled].append(server.stream(n, args.seconds, num_stalled))
    print(f"\n{n} streams, of which so many are not read")
    print(f"{'':22} {'tokens/s':>9} {'slowest':>8} {'memory':>12}")
    for num_stalled, of_case in counts.items():
        grown = middle(of_case, lambda c: c.server_grown_bytes)
        print(f"{num_stalled:<22} {middle(of_case, lambda c: c.tokens_per_s):9,.0f}"
              f" {middle(of_case, lambda c: c.fewest / (sum_of(c) or 1)):8.0%} {grown / 1024:+8,.0f} KiB")  # fmt: skip


def prompts(cores: Cores, args: argparse.Namespace) -> None:
    """How late the event loop wakes up while long prompts arrive. SmolLM2's tokenizer, where it is in the cache."""
    path = cached_alias_path("smollm2")
    options = [] if path is None else ["--tokenizer", str(path)]
    seconds = 5.0 if args.quick else 20.0
    words = [word for word in Path(__file__).read_text().split() if word.isalpha() and len(word) > 4]
    drawn = random.Random(0)
    text = " ".join(drawn.choices(words, k=NUM_CHARS // 5))[:NUM_CHARS]
    gaps, slowest, statuses = [], [], set()
    with FrontEndServer(cores, *options, is_pinned=False) as server:
        for chars in (100, NUM_CHARS):
            before = lag_counts(server)
            statuses |= arrive(server, text[:chars], seconds, slowest)
            gaps.append(quantiles(before, lag_counts(server)))
    name = "smollm2's tokenizer" if path is not None else "byte tokenizer"
    print(f"\n{PROMPTS_PER_S} prompts a second for {seconds:g} s, {name} (statuses {sorted(statuses)})")
    print(f"{'characters':22} {'loop gap p99':>13} {'p99.9':>9} {'slowest /livez':>15}")
    for chars, (p99, p999), livez in zip((100, NUM_CHARS), gaps, slowest, strict=True):
        print(f"{chars:<22,} {p99:>13} {p999:>9} {livez * 1000:12.1f} ms")


def arrive(server: FrontEndServer, text: str, seconds: float, slowest: list[float]) -> set[int]:
    """Prompts at their rate, whatever the server does; beside them a probe that is measured."""
    statuses: set[int] = set()
    worst, has_ended = 0.0, threading.Event()
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()

    def send() -> None:
        reply = httpx.post(server.url + CHAT, content=body, timeout=60.0, headers={"Content-Type": "application/json"})
        statuses.add(reply.status_code)

    def probe() -> None:
        nonlocal worst
        with httpx.Client(base_url=server.url, timeout=10.0) as client:
            client.get("/livez")
            while not has_ended.wait(0.01):
                begun = time.perf_counter()
                client.get("/livez")
                worst = max(worst, time.perf_counter() - begun)

    with ThreadPoolExecutor(32) as pool:
        pool.submit(send).result()
        probing = pool.submit(probe)
        for _ in range(int(seconds * PROMPTS_PER_S)):
            pool.submit(send)
            time.sleep(1 / PROMPTS_PER_S)
        has_ended.set()
        probing.result()
    slowest.append(worst)
    return statuses


def lag_counts(server: FrontEndServer) -> dict[float, float]:
    """Upper bound in seconds -> observations up to it."""
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(LAG)]
    return {float(line.split('le="')[1].split('"')[0]): float(line.rsplit(" ", 1)[1]) for line in lines}


def quantiles(before: dict[float, float], after: dict[float, float]) -> tuple[str, str]:
    """p99 and p99.9, as the bound of the bucket that they are in."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = max(counts.values())

    def up_to(share: float) -> str:
        return f"<= {min(bound for bound, count in counts.items() if count >= share * total) * 1000:g} ms"

    return up_to(0.99), up_to(0.999)


def aborts(cores: Cores, args: argparse.Namespace) -> None:
    """What requests leave behind, one in five of them aborted."""
    num_requests = 2000 if args.quick else 20_000
    options = ("--max-num-seqs", "64", "--no-enable-prefix-caching")  # the engine's cache may grow until it is full
    with FrontEndServer(cores, *options) as server:
        processes = {"front end": server.front_end, "engine": server.children("headrace.engine.process")[0]}
        run_requests(server.url, num_requests // 5, ABORTED, cores and cores[1])
        load = server.wait_idle()
        resident = {name: process.memory_info().rss for name, process in processes.items()}
        descriptors = {name: process.num_fds() for name, process in processes.items()}
        seconds = run_requests(server.url, num_requests, ABORTED, cores and cores[1])
        blocks = server.wait_idle()["free_blocks"] - load["free_blocks"]
        print(f"\n{num_requests:,} requests, one in {ABORTED} aborted, {num_requests / seconds:,.0f} a second"
              f" ({num_requests // 5:,} before them to warm up)")  # fmt: skip
        for name, process in processes.items():
            grown = (process.memory_info().rss - resident[name]) / num_requests
            print(f"{name:22} {grown:+8.0f} bytes a request, {process.num_fds() - descriptors[name]:+} descriptors")
        print(f"{'free blocks':22} {blocks:+8}; nothing runs, waits or is queued")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer streams, rounds and requests")
    parser.add_argument("--only", default=",".join(CASES), metavar="CASES")
    parser.add_argument("--streams", type=int, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="S")
    parser.add_argument("--rounds", type=int, metavar="N")
    args = parser.parse_args()
    args.streams = args.streams or (256 if args.quick else 1024)
    args.seconds = args.seconds or (1.5 if args.quick else 4.0)
    args.rounds = args.rounds or (1 if args.quick else 3)
    cores = sse_servers.two_cores()
    for name, case in (("streams", streams), ("stalled", stalled), ("prompts", prompts), ("aborts", aborts)):
        if name in args.only.split(","):
            case(cores, args)


if __name__ == "__main__":
    main()
