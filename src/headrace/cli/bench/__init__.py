"""`headrace bench serve` and `headrace bench offline`."""

from __future__ import annotations

import argparse

from headrace.cli.bench import offline, serve
from headrace.cli.help import HelpFormatter

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", dest="kind", required=True)
    for name, module, help_line in (
        ("serve", serve, "load on an OpenAI-compatible server: latencies and tokens per second"),
        ("offline", offline, "the engine alone, in this process: prefill and decode speed by batch size"),
    ):
        kind = kinds.add_parser(
            name, help=help_line, description=f"Measures {help_line}.", formatter_class=HelpFormatter
        )
        kind.set_defaults(run_benchmark=module.run)
        module.add_arguments(kind)


def run(args: argparse.Namespace) -> int:
    return int(args.run_benchmark(args))
