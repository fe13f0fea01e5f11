"""What `headrace ctl` prints: replies as lines for people, and a progress bar on a terminal while something runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headrace.config.size import format_size

Json = dict[str, Any]


class Bar:
    """One line on stderr: how much was sent, then what the server is at."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self._task = progress.add_task(name, total=None)

    def begin_upload(self, name: str, num_bytes: int) -> None:
        self._progress.reset(self._task, total=num_bytes, description=f"sending {name} ({format_size(num_bytes)})")

    def add_bytes(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)

    def show_status(self, status: Json) -> None:
        refresh = status.get("refresh")
        text = self._name if refresh is None else f"{self._name}, {refresh['num_tensors']} tensors"
        self._progress.update(self._task, description=text, total=None)


@contextmanager
def progress_bar(name: str) -> Iterator[Bar]:
    """Nothing is written where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, name)


def print_reply(args: argparse.Namespace, reply: Json, lines: Iterable[str]) -> None:
    print(json.dumps(reply, indent=2) if args.json else "\n".join(lines))


def table_lines(rows: Sequence[Sequence[str]], alignment: str) -> Iterator[str]:
    """`alignment`: l or r for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, alignment, strict=True)
        yield "  ".join(cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in cells).rstrip()


def operation_lines(operation: Json) -> Iterator[str]:
    """What was done and how long it took, then a line per rank."""
    yield f"{operation['kind']}: {operation['state']}{_duration(operation)}"
    for rank in operation.get("result") or ():
        fields = {name: value for name, value in rank.items() if name not in ("rank", "tensors")}
        if fields:
            yield f"  rank {rank.get('rank', 0)}: " + ", ".join(
                f"{name} {_text(name, fields[name])}" for name in fields
            )
        for name, value in (rank.get("tensors") or {}).items():
            yield f"  {value}  {name}"


def list_lines(operations: list[Json]) -> Iterator[str]:
    for operation in operations:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(operation["started"]))
        line = f"{operation['id']}  {started}  {operation['kind']}: {operation['state']}{_duration(operation)}"
        yield line + (f" ({error_text(operation)})" if operation.get("error") else "")
    if not operations:
        yield "no operations yet"


def status_lines(status: Json) -> Iterator[str]:
    reason = f" ({status['reason']})" if status.get("reason") else ""
    rows = {
        "state": f"{status['state']}{reason}",
        "weights": f"version {status['version']}, epoch {status['epoch']}",
        "requests": f"{status['num_running']} running, {status['num_waiting']} waiting",
    }
    if status.get("is_paused"):
        rows["paused"] = f"yes, mode {status.get('pause_mode')}"
    if status.get("is_draining"):
        rows["draining"] = "yes"
    if status.get("asleep"):
        rows["asleep"] = ", ".join(status["asleep"])
    if refresh := status.get("refresh"):
        kind = "staged" if refresh["staged"] else "in place"
        rows["refresh"] = f"open for {_since(refresh)}, {kind}, {refresh['num_tensors']} tensors"
    if operation := status.get("operation"):
        rows["operation"] = f"{operation['kind']} {operation['id']}, running for {_since(operation)}"
    for name, text in rows.items():
        yield f"{name:<10} {text}"


def error_text(operation: Json) -> str:
    error = operation.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error or operation["state"])


def _since(part: Json) -> str:
    return f"{max(0.0, time.time() - part['started']):.1f} s"


def _duration(operation: Json) -> str:
    if operation.get("ended") is None:
        return f" for {_since(operation)}"
    return f" in {operation['ended'] - operation['started']:.2f} s"


def _text(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return format_size(value)
    if name.endswith("_s") and isinstance(value, int | float):
        return f"{value:.3f} s"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)
