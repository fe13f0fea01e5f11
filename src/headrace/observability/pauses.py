"""How long the garbage collector stopped a process: the interpreter runs nothing else meanwhile, in no thread.

A front end begins one when it starts and puts what it has seen into its metrics on the event loop. The collector calls
back in whatever thread it happened to run.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator

_MAX_KEPT = 1000  # between two looks


class CollectorPauses:
    """Listens from construction to `close`."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._seconds: deque[float] = deque(maxlen=_MAX_KEPT)
        gc.callbacks.append(self._notice)

    def take(self) -> Iterator[float]:
        """Seconds of each pause since the last look."""
        while self._seconds:
            yield self._seconds.popleft()

    def close(self) -> None:
        """Idempotent."""
        if self._notice in gc.callbacks:
            gc.callbacks.remove(self._notice)

    def _notice(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self._seconds.append(time.perf_counter() - self._began_s)
