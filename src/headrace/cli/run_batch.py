"""`headrace run-batch`: answers a file of requests in OpenAI's batch format; the model runs here or behind `--url`.

Results are appended as they come. The same command once more goes on where a run was broken off; with --retry-failed it
also asks again what has ended in an error. Exit codes: 0 every line has a good answer, 1 some have failed or the run
could not go on, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.cli.run_batch_lines import URLS, InputLines, parse_lines
from headrace.cli.run_batch_output import OutputLines
from headrace.config.cli import add_options, given_options
from headrace.config.generation import resolve_model_config
from headrace.config.load import load_config
from headrace.config.options import AdmissionConfig, EngineConfig, ParsingConfig, SchedulerConfig, ServeConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    import httpx

BATCHES_AT_ONCE: Final = 2  # one runs, one stands ready
RETRIES: Final = 8


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """What of the server's options a batch has a use for. A YAML file may have all of them."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    parsing: ParsingConfig = field(default_factory=ParsingConfig)


@dataclass(frozen=True, slots=True)
class Target:
    """How to reach a model, and how many requests fill its batch."""

    concurrency: int
    connect: Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace run-batch -i IN.jsonl -o OUT.jsonl [--model MODEL | --url URL] [options]"
    parser.description = f"Answers a file of requests in OpenAI's batch format, to {', '.join(URLS)}."
    batch = parser.add_argument_group("Batch")
    batch.add_argument("-i", "--input", required=True, metavar="FILE", help="requests, one a line; .gz too; -: stdin")
    batch.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="results; what it has already is not asked again; -: stdout",
    )
    batch.add_argument(
        "--retry-failed",
        action="store_true",
        help="ask again what the output has as an error; those lines are taken out of it first",
    )
    batch.add_argument("--concurrency", type=int, metavar="N", help="requests at once (default: what fills the batch)")
    batch.add_argument(
        "--retries",
        type=int,
        default=RETRIES,
        metavar="N",
        help=f"tries after a full queue or a lost connection, before the run ends (default: {RETRIES})",
    )
    server = parser.add_argument_group("Server (instead of a model in this process)")
    server.add_argument("--url", metavar="URL", help="base URL of an OpenAI-compatible server")
    server.add_argument("--key", metavar="KEY", help="its API key (or HEADRACE_API_KEY)")
    add_options(parser, BatchConfig, positional=False)


def run(args: argparse.Namespace) -> int:
    _check(args)
    lines = InputLines(args.input)
    with OutputLines(args.output, drop_failed=args.retry_failed) as output:
        target = _choose_target(args)
        with _progress(output, lines.num_lines) as on_line:
            asyncio.run(_answer(lines, output, target, args, on_line))
        return 1 if output.num_failed else 0


def _check(args: argparse.Namespace) -> None:
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1")
    if args.retries < 0:
        raise ConfigError("--retries must be at least 0")
    is_same = args.input != "-" and args.output != "-" and os.path.exists(args.input) and os.path.exists(args.output)
    if is_same and os.path.samefile(args.input, args.output):
        raise ConfigError(f"{args.output} is both input and output")


async def _answer(
    lines: InputLines, output: OutputLines, target: Target, args: argparse.Namespace, on_line: Callable[[], None]
) -> None:
    from headrace.cli.run_batch_work import answer_all

    async with target.connect() as http:
        concurrency = args.concurrency or target.concurrency
        await answer_all(
            parse_lines(lines), output, http, concurrency=concurrency, retries=args.retries, on_line=on_line
        )


def _choose_target(args: argparse.Namespace) -> Target:
    given = given_options(args, BatchConfig)
    if args.url is not None:
        for key in given:
            raise ConfigError(f"--{key.replace('_', '-')} is an option of the engine; with --url it has no effect")
        if args.config is not None:
            raise ConfigError("--config is read for a model in this process; with --url it has no effect")
        from headrace.cli.run_batch_remote import server_target

        api_key = args.key or os.environ.get("HEADRACE_API_KEY")
        width = SchedulerConfig().max_num_seqs
        return Target(BATCHES_AT_ONCE * width, lambda: server_target(args.url, api_key))
    # Imported late: `--help`, a wrong option and a server at --url need none of it.
    from headrace.cli.run_batch_local import local_target

    config, path = _resolve(load_config(ServeConfig, given, args.config))
    width = config.engine.scheduler.max_num_seqs
    return Target(BATCHES_AT_ONCE * width, lambda: local_target(config, path))


def _resolve(config: ServeConfig) -> tuple[ServeConfig, Path | None]:
    """The model's folder (fetched if it is missing) and the config with what the model brings."""
    from headrace.weights.hub import resolve_model

    if config.server.mock_engine:
        return config, None
    model = config.engine.model
    resolved = resolve_model(model.model, model.revision)
    model = resolve_model_config(model, resolved.name, resolved.recommended_sampling)
    engine = dataclasses.replace(config.engine, model=model)
    return dataclasses.replace(config, engine=engine), resolved.path


@contextmanager
def _progress(output: OutputLines, num_lines: int) -> Iterator[Callable[[], None]]:
    """A bar while it runs, and at the end a line of numbers. Nothing is written where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    num_before, start = output.num_done, time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("run-batch", total=num_lines)

        def on_line() -> None:
            failures = f", {output.num_failed} failed" if output.num_failed else ""
            progress.update(task, advance=1, description=f"run-batch{failures}")

        yield on_line
    if console.is_terminal:
        seconds = time.monotonic() - start
        earlier = f", {num_before} before" if num_before else ""
        console.print(
            f"{output.num_done - num_before} lines in {seconds:.1f} s{earlier}; {output.num_failed} failed in all"
        )
