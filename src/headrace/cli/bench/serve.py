"""`headrace bench serve`: load on any OpenAI-compatible server; latencies and throughput as a table and as JSON."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import headrace
from headrace.cli.bench.load import Load, run_round
from headrace.cli.bench.stats import PERCENTILES, median, spread, summarise, write_json
from headrace.cli.sources import api_base
from headrace.errors import ConfigError, StartupError

LATENCIES = (("ttft_ms", "time to first token"), ("inter_token_ms", "inter-token"), ("e2e_ms", "end to end"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="(default: the first one that the server lists)")
    parser.add_argument("--key", metavar="KEY", help="API key (or HEADRACE_API_KEY)")
    parser.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="(default: %(default)s)"
    )
    arrival = parser.add_mutually_exclusive_group()
    arrival.add_argument("--concurrency", type=int, metavar="N", help="requests in flight (default: 8)")
    arrival.add_argument("--request-rate", type=float, metavar="X", help="Poisson arrivals, requests per second")
    parser.add_argument(
        "--num-requests", type=int, default=64, metavar="N", help="of each round (default: %(default)s)"
    )
    parser.add_argument(
        "--input-tokens", type=int, default=128, metavar="N", help="about, in random words (default: %(default)s)"
    )
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for all output tokens; strict OpenAI servers may refuse the field (default: on)",
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measure so often (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="requests before it counts (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers there; - for stdout instead of the table")


def run(args: argparse.Namespace) -> int:
    _check(args)
    report = asyncio.run(_measure(args))
    if args.json == "-":
        print(json.dumps(report, indent=2))
    else:
        if args.json:
            write_json(args.json, report)
        _print(report)
    return 1 if all(row["num_failed"] == row["num_requests"] for row in report["rounds"]) else 0


def _check(args: argparse.Namespace) -> None:
    for name in ("num_requests", "input_tokens", "output_tokens", "rounds", "concurrency", "request_rate"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is out of range, allowed: above 0")


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    key = args.key or os.environ.get("HEADRACE_API_KEY")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=api_base(args.url), headers=headers, timeout=None, limits=limits) as http:
        load = Load(
            model=args.model or await _first_model(http),
            endpoint=args.endpoint,
            num_requests=args.num_requests,
            concurrency=None if args.request_rate else args.concurrency or 8,
            request_rate=args.request_rate,
            input_tokens=args.input_tokens,
            output_tokens=args.output_tokens,
            ignore_eos=args.ignore_eos,
            seed=args.seed,
        )
        if args.warmup > 0:
            warmup = dataclasses.replace(load, num_requests=args.warmup, request_rate=None, seed=load.seed - 1)
            await run_round(http, warmup, lambda: None)
        rounds = []
        with Progress(console=Console(stderr=True), transient=True) as bar:
            for number in range(args.rounds):
                task = bar.add_task(f"round {number + 1} of {args.rounds}", total=load.num_requests)
                # Each round has prompts of its own: those of the round before lie in the server's prefix cache.
                trials, duration_s = await run_round(
                    http,
                    dataclasses.replace(load, seed=load.seed + number),
                    lambda task=task: bar.advance(task),  # type: ignore[misc]
                )
                rounds.append(summarise(trials, duration_s))
    return {
        "headrace": headrace.__version__,
        "url": str(http.base_url),
        "load": dataclasses.asdict(load),
        "rounds": rounds,
        "median": {
            name: median([row[name] for row in rounds])
            for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
        },
    }


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("/models", timeout=10.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise StartupError(f"cannot reach {http.base_url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(f"{http.base_url}models lists no model; give --model") from error


def _print(report: dict[str, Any]) -> None:
    console = Console()
    load, rounds = report["load"], report["rounds"]
    how = f"{load['request_rate']:g} requests/s" if load["request_rate"] else f"{load['concurrency']} at once"
    asked = f"about {load['input_tokens']} tokens in, {load['output_tokens']} out"
    console.print(f"{load['model']} at {report['url']}: {load['num_requests']} requests, {how}, {asked}", markup=False)
    table = Table("", "value" if len(rounds) == 1 else "median (lowest to highest round)")
    for name, title in (
        ("output_tokens_per_s", "output tokens/s"),
        ("total_tokens_per_s", "total tokens/s"),
        ("requests_per_s", "requests/s"),
        ("duration_s", "duration, s"),
    ):
        table.add_row(title, spread([row[name] for row in rounds]))
    num_failed = sum(row["num_failed"] for row in rounds)
    table.add_row("failed requests", str(num_failed), style="red" if num_failed else "")
    console.print(table)
    latencies = Table("latency, ms", "mean", *(f"p{percent}" for percent in PERCENTILES))
    for name, title in LATENCIES:
        found = [row[name] for row in rounds if row[name] is not None]
        if found:
            columns = ("mean", *(f"p{percent}" for percent in PERCENTILES))
            latencies.add_row(title, *(f"{median([row[column] for row in found]):.1f}" for column in columns))
    console.print(latencies)
    for row in rounds:
        for reason, count in list(row["failures"].items())[:3]:
            console.print(f"{count} failed: {reason}", markup=False, style="red")
