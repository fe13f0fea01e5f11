"""Totals that nobody else keeps: how many tokens steps had, what refreshes took. The core fills them and shows them."""

from __future__ import annotations

from bisect import bisect_left

from headrace.transport.stats import REFRESH_SOURCES, STEP_TOKEN_BOUNDS


class Counts:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_step_tokens = 0
        self.steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self.refreshes = [0] * len(REFRESH_SOURCES)
        self.refresh_us = [0] * len(REFRESH_SOURCES)

    def count_step(self, num_tokens: int) -> None:
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def count_refresh(self, kinds: set[str], seconds: float) -> None:
        """`kinds`: of the sources that it read."""
        source = "mixed" if len(kinds) > 1 else next(iter(kinds), "none")
        index = REFRESH_SOURCES.index(source)
        self.refreshes[index] += 1
        self.refresh_us[index] += round(seconds * 1e6)
