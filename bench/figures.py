"""The figures of the README: Headrace here, beside the machine's own limits and, with --peers, other engines.

    make bench                                           # Headrace alone
    make bench-peers PEERS=/path/to/venv/bin/python      # and llama.cpp and OpenVINO GenAI, in alternating rounds

Every round starts each server anew, so one line shows start-up too. Greedy, 64 tokens in and 64 out unless the line
says otherwise, streamed over HTTP, prompts all different, prefix caching off. Medians; the spread is in the JSON
(--json). The limits are measured first, with nothing else running: memory bandwidth and the 8-bit dot product on all
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench import systems

from headrace.cli.bench.load import Load, prompts_of, run_round
from headrace.cli.bench.stats import median, summarise
from headrace.kernels.native import _native
from headrace.weights.gguf import GGUFFile
from headrace.weights.hub import resolve_model


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    streams: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    measure: str  # output: output tokens/s; prompt: prompt tokens/s; pace: 1 / time per output token
    limit: str  # which of the machine's limits it is held against


SCENARIOS = (
    Scenario("one stream", 1, 4, 64, 64, "output", "stream"),
    Scenario("16 streams", 16, 48, 64, 64, "output", "batch"),
    Scenario("64 streams", 64, 128, 64, 64, "output", "batch"),
    Scenario("prefill of 512 tokens", 1, 4, 512, 1, "prompt", "prefill"),
    Scenario("one stream, pace at 64 tokens", 1, 2, 64, 64, "pace", ""),
    Scenario("one stream, pace at 4,096 tokens", 1, 2, 4032, 64, "pace", ""),
)


def limits_of(model_file: Path, num_threads: int) -> dict[str, float]:
    """Tokens per second that bandwidth and arithmetic would allow, and the two themselves."""
    read, int8 = _native.measure_limits(_native.Pool(num_threads, False))
    tensors = [t for t in GGUFFile(model_file).tensors.values() if len(t.shape) == 2]
    head = max(tensors, key=lambda tensor: tensor.shape[0] * tensor.shape[1])
    num_bytes = sum(tensor.data.nbytes for tensor in tensors)
    num_weights = sum(tensor.shape[0] * tensor.shape[1] for tensor in tensors)
    body = num_weights - head.shape[0] * head.shape[1]
    return {
        "read_gb_s": read / 1e9,
        "int8_gop_s": int8 / 1e9,
        "stream": read / num_bytes,
        "batch": int8 / (2 * num_weights),
        "prefill": int8 / (2 * body),
        "weights_mb": num_bytes / 1e6,
    }


def load_of(model: str, scenario: Scenario, seed: int) -> Load:
    return Load(
        model=model,
        endpoint="completions",
        num_requests=scenario.num_requests,
        concurrency=scenario.streams,
        request_rate=None,
        input_tokens=scenario.input_tokens,
        output_tokens=scenario.output_tokens,
        ignore_eos=True,
        seed=seed,
    )


async def load_server(url: str, model: str, scenario: Scenario, seed: int) -> float:
    load = load_of(model, scenario, seed)
    async with httpx.AsyncClient(base_url=url + "/v1", timeout=None) as http:
        trials, seconds = await run_round(http, load, lambda: None)
    row = summarise(trials, seconds)
    if row["num_failed"]:
        raise SystemExit(f"{url}: {row['failures']}")
    if scenario.measure == "prompt":
        return float(row["prompt_tokens"] / seconds)
    if scenario.measure == "pace":
        return statistics.median(1 / gap for trial in trials for gap in trial.gaps_s if gap > 0)
    return float(row["output_tokens_per_s"])


def measure_round(args: argparse.Namespace, model_file: Path, round_number: int, table: dict[str, Any]) -> None:
    def note(system: str, line: str, value: float) -> None:
        table.setdefault(system, {}).setdefault(line, []).append(value)
        print(f"  {system:10} {line:34} {value:9,.1f}", file=sys.stderr)

    def run_all(system: str, running: systems.Running, model: str) -> None:
        note(system, "start to ready, s", running.ready_s)
        asyncio.run(load_server(running.url, model, SCENARIOS[0], 10_000 + round_number))  # warm-up
        note(system, "resident memory, MB", running.resident_bytes() / 1e6)
        for scenario in scenarios:
            note(system, scenario.name, asyncio.run(load_server(running.url, model, scenario, round_number)))

    chosen = args.only.split(",") if args.only else None
    scenarios = [s for s in SCENARIOS if chosen is None or any(word in s.name for word in chosen)]
    with systems.headrace(args.model, *args.option) as running:
        run_all("Headrace", running, "default")
    if args.peers is None:
        return
    # 16 slots, as its users would start it for several streams; its context is what all slots share.
    with systems.llama_cpp(args.peers, model_file, 16, 16 * 1024) as running:
        scenarios = [s for s in scenarios if s.input_tokens < 1000]
        run_all("llama.cpp", running, "default")
    for scenario in (s for s in scenarios if s.measure != "pace" and args.openvino):
        prompts = prompts_of(load_of("", scenario, round_number))
        seconds = systems.openvino_seconds(args.peers, model_file, prompts, scenario.streams, scenario.output_tokens)
        num_tokens = scenario.input_tokens if scenario.measure == "prompt" else scenario.output_tokens
        note("OpenVINO", scenario.name, scenario.num_requests * num_tokens / seconds)


def print_table(table: dict[str, Any], limits: dict[str, float]) -> None:
    names = list(table)
    print(f"\nmemory {limits['read_gb_s']:.1f} GB/s, 8-bit arithmetic {limits['int8_gop_s']:.0f} GOP/s, "
          f"weights {limits['weights_mb']:.0f} MB\n")  # fmt: skip
    print("| | " + " | ".join(names) + " | the machine's limit | of it |")
    print("|---" * (len(names) + 3) + "|")
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    for line in table["Headrace"]:
        cells = [f"{median(table[n][line]):,.4g}" if line in table[n] else "" for n in names]
        scenario = by_name.get(line)
        limit = limits[scenario.limit] if scenario is not None and scenario.limit else None
        share = f"{median(table['Headrace'][line]) / limit:.0%}" if limit else ""
        print(f"| {line} | " + " | ".join(cells) + f" | {f'{limit:,.0f}' if limit else ''} | {share} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--option", action="append", default=[], help="of headrace serve, such as --option=--threads=1")
    parser.add_argument("--peers", type=Path, help="Python of an environment with xllamacpp and openvino-genai")
    parser.add_argument("--openvino", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="words of the lines to measure, separated by commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model_file = resolve_model(args.model).path
    limits = limits_of(model_file, len(os.sched_getaffinity(0)))
    table: dict[str, Any] = {}
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        measure_round(args, model_file, number, table)
    print_table(table, limits)
    if args.json:
        args.json.write_text(json.dumps({"limits": limits, "figures": table}, indent=2))


if __name__ == "__main__":
    main()
