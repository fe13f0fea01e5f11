"""`headrace pull`: fetches a model into the cache, so that `serve` starts without a network."""

from __future__ import annotations

import argparse

from headrace.weights.aliases import ALIASES
from headrace.weights.hub import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    aliases = ", ".join(
        f"{alias.name} ({alias.size_bytes / 1e6:.0f} MB, {alias.licence})" for alias in ALIASES.values()
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a Hugging Face id (owner/name[:file.gguf]) or an alias: {aliases}"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    print(resolve_model(args.model, args.revision, progress=not args.quiet).path)
    return 0
