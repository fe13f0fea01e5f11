"""`headrace complete`: one prompt in, its completion streamed to stdout, nothing else on stdout."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from headrace.cli.sources import add_source_arguments, open_source, sampling_of
from headrace.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace complete [PROMPT] [--model MODEL | --url URL] [options]"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to go on from; absent or -: from stdin")
    parser.add_argument("--echo", action="store_true", help="print the prompt before its completion")
    add_source_arguments(parser, temperature=0.0, max_tokens=128, positional=False)


def run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    if not prompt:
        raise ConfigError("the prompt is empty")
    with closing(open_source(args)) as source:
        if args.echo:
            print(prompt, end="", flush=True)
        with closing(source.complete(prompt, sampling_of(args))) as pieces:
            for piece in pieces:
                print(piece.text, end="", flush=True)
        print()
    return 0
