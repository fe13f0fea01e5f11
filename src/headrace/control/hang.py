"""Tells an engine that hangs from one that is merely slow. The supervisor asks on each of its ticks.

An engine writes its heartbeat once a step and at least once a second. Only time that the supervisor itself was awake
counts, so that a container that was frozen for an hour is no hang.
"""

from __future__ import annotations

from typing import Final

_MAX_TICK_S: Final = 1.0  # a longer gap between two looks is the supervisor's own sleep


class HangWatch:
    """For how long the same heartbeat has been seen."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heartbeat_ns = -1
        self._looked_s = 0.0
        self._silent_s = 0.0

    def is_hung(self, heartbeat_ns: int, now_s: float) -> bool:
        """`now_s` is monotonic."""
        awake_s = min(now_s - self._looked_s, _MAX_TICK_S)
        self._looked_s = now_s
        is_same = heartbeat_ns == self._heartbeat_ns
        self._heartbeat_ns = heartbeat_ns
        self._silent_s = self._silent_s + awake_s if is_same else 0.0
        return self._silent_s >= self._limit_s
