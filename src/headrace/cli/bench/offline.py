"""`headrace bench offline`: the engine in this process, without HTTP: prefill and decode speed by batch size.

Each batch size is run twice, once for one token and once for all: the first is the prefill, the difference the decode.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from headrace.cli.bench.stats import median, spread, write_json
from headrace.config.cli import add_options, given_options
from headrace.config.load import load_config
from headrace.config.options import EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace bench offline [MODEL] [options]"
    parser.add_argument("--batch-sizes", default="1,4,16", metavar="N,...", help="(default: %(default)s)")
    parser.add_argument("--input-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measure so often (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there; - for stdout instead of the table")
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    batch_sizes = _batch_sizes(args.batch_sizes)
    for name in ("input_tokens", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is out of range, allowed: at least 1")
    if args.output_tokens < 2:
        raise ConfigError(f"--output-tokens: {args.output_tokens} is out of range, allowed: at least 2")
    # A hit in the prefix cache would hide the prefill.
    given = {"enable_prefix_caching": False, "max_num_seqs": max(64, *batch_sizes), **given_options(args, EngineConfig)}
    config = load_config(EngineConfig, given, args.config)
    from headrace.llm import LLM

    with LLM.from_config(config) as llm:
        rows = _measure(llm, batch_sizes, args)
        report = {"model": llm.name, "backend": llm.info.backend, "input_tokens": args.input_tokens,
                  "output_tokens": args.output_tokens, "batches": rows}  # fmt: skip
    if args.json == "-":
        print(json.dumps(report, indent=2))
        return 0
    if args.json:
        write_json(args.json, report)
    _print(report)
    return 0


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch-sizes: {text!r} is not a list of numbers such as 1,4,16") from error
    if min(sizes) < 1:
        raise ConfigError(f"--batch-sizes: {min(sizes)} is out of range, allowed: at least 1")
    return sizes


def _measure(llm: LLM, batch_sizes: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    generator = random.Random(0)
    _seconds(llm, _prompts(llm, generator, 1, args.input_tokens), 2)  # warm-up: caches, threads, compiled kernels
    rows = []
    with Console(stderr=True).status("measuring"):
        for size in batch_sizes:
            prefill, decode = [], []
            for _ in range(args.rounds):
                prompts = _prompts(llm, generator, size, args.input_tokens)
                first_s = _seconds(llm, prompts, 1)
                all_s = _seconds(llm, prompts, args.output_tokens)
                prefill.append(size * args.input_tokens / first_s)
                decode.append(size * (args.output_tokens - 1) / max(all_s - first_s, 1e-9))
            rows.append({"batch_size": size, "prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode})
    return rows


def _prompts(llm: LLM, generator: random.Random, size: int, num_tokens: int) -> list[list[int]]:
    return [[generator.randrange(llm.info.vocab_size) for _ in range(num_tokens)] for _ in range(size)]


def _seconds(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    from headrace.types import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def _print(report: dict[str, Any]) -> None:
    console = Console()
    lengths = f"{report['input_tokens']} tokens in, {report['output_tokens']} out"
    console.print(f"{report['model']}, backend {report['backend']}, {lengths}", markup=False)
    table = Table("batch", "prefill tokens/s", "decode tokens/s", "decode tokens/s per sequence")
    for row in report["batches"]:
        decode = row["decode_tokens_per_s"]
        per_sequence = median(decode) / row["batch_size"]
        table.add_row(
            str(row["batch_size"]), spread(row["prefill_tokens_per_s"]), spread(decode), f"{per_sequence:.1f}"
        )
    console.print(table)
