"""The `headrace` command: imports the chosen subcommand alone, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 an error that was explained in one line, 2 wrong usage, 130 interrupted. Each subcommand is a
module with `add_arguments(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import headrace
from headrace.cli.help import HelpFormatter
from headrace.errors import HeadraceError

COMMANDS = {
    "serve": ("headrace.cli.serve", "serve a model through an OpenAI-compatible API"),
    "chat": ("headrace.cli.chat", "talk to a model in the terminal"),
    "complete": ("headrace.cli.complete", "complete one prompt and print the text"),
    "run-batch": ("headrace.cli.run_batch", "answer a file of requests in OpenAI's batch format"),
    "ctl": ("headrace.cli.ctl", "pause, refresh, put to sleep and ask a running server"),
    "pull": ("headrace.cli.pull", "fetch a model into the cache"),
    "bench": ("headrace.cli.bench", "measure a server, or the engine alone"),
    "experts": ("headrace.cli.experts", "simulate the balancing of experts, draw their load"),
    "doctor": ("headrace.cli.doctor", "what this machine has and what Headrace would use"),
    "version": ("headrace.cli.version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        print(f"headrace: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # `headrace ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="An inference server for language models.",
        epilog="`headrace COMMAND --help` explains a command.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    module: Any = None
    for name, (path, help_line) in COMMANDS.items():
        command = commands.add_parser(
            name, help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.", formatter_class=HelpFormatter
        )
        if name == chosen:  # only the chosen command is imported: `headrace --help` stays quick
            module = importlib.import_module(path)
            module.add_arguments(command)
    args = parser.parse_args(argv)
    return int(module.run(args))
