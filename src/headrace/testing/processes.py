"""Processes of a server under test: which there are, whether they have gone, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from headrace.testing.server import RunningServer


def eventually(condition: Callable[[], object], seconds: float = 5.0, what: str = "what was expected") -> None:
    """Looks until it is so. For what happens in another process, which no event of this one announces."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come true in {seconds:g} s"
        time.sleep(0.02)


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    """A dead process that nobody has waited for yet counts as gone."""
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def family(server: RunningServer) -> list[psutil.Process]:
    """All processes that the server has started, and theirs."""
    return psutil.Process(server.process.pid).children(recursive=True)
