"""`headrace version`."""

from __future__ import annotations

import argparse

import headrace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    print(f"headrace {headrace.__version__}")
    return 0
