"""What tracing costs a front end: CPU per request and requests per second, off, on without sampling, and sampled.

    python bench/tracing.py --num-requests 2000 --rounds 5

The mock engine serves short requests, so that nothing else costs much. All servers run side by side and take turns, in
another order each round; CPU time is the front-end process's own, its exporting thread included. `--only-off` leaves
out the others, for a version that does not know them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics

import httpx

from headrace.cli.bench.load import Load, run_round
from headrace.testing.server import RunningServer


def start(case: str, collector: str | None) -> RunningServer:
    os.environ["OTEL_TRACES_SAMPLER"] = "always_off" if case == "not sampled" else "always_on"
    tracing = [] if case == "off" or collector is None else ["--otlp-traces-endpoint", collector]
    return RunningServer(["--mock-engine", "--log-level", "warning", *tracing])


async def measure(server: RunningServer, num_requests: int, seed: int) -> tuple[float, float]:
    """CPU microseconds of the front end per request, and requests per second."""
    (front_end,) = server.children("headrace.server.process")
    load = Load(model="echo", endpoint="completions", num_requests=num_requests, concurrency=8, request_rate=None,
                input_tokens=16, output_tokens=8, ignore_eos=True, seed=seed)  # fmt: skip
    async with httpx.AsyncClient(base_url=f"{server.url}/v1/", timeout=None) as http:
        before = sum(front_end.cpu_times()[:2])
        trials, seconds = await run_round(http, load, lambda: None)
    assert all(trial.error is None for trial in trials)
    return (sum(front_end.cpu_times()[:2]) - before) / num_requests * 1e6, num_requests / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=2000, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--only-off", action="store_true")
    args = parser.parse_args()
    cases = ["off"] if args.only_off else ["off", "not sampled", "sampled"]
    with contextlib.ExitStack() as stack:
        url = None
        if not args.only_off:
            from headrace.testing.collector import Collector

            url = stack.enter_context(Collector()).url
        servers = {case: stack.enter_context(start(case, url)) for case in cases}
        found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for number in range(args.rounds + 1):
            for case in cases if number % 2 else reversed(cases):
                figures = asyncio.run(measure(servers[case], args.num_requests, number))
                if number:  # the first round warms up
                    found[case].append(figures)
    for case, figures in found.items():
        cpu, rate = zip(*figures, strict=True)
        print(f"{case:12} {statistics.median(cpu):7.0f} us of CPU per request ({min(cpu):.0f} to {max(cpu):.0f}), "
              f"{statistics.median(rate):6.0f} requests/s ({min(rate):.0f} to {max(rate):.0f})")  # fmt: skip


if __name__ == "__main__":
    main()
