"""Counters of an engine, as it publishes them: `engine/core.py` makes them, the status board and `/metrics` show them.

Gauges are of this moment; `num_preemptions` and what follows are totals since the start, but for the two balances. They
hold no stamps: whoever publishes them stamps the heartbeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REFRESH_SOURCES = ("path", "shared_memory", "file", "group", "mixed", "none")
"""The kinds of source of a refresh; several in one; none at all, for a commit without a tensor."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the engine's counters; field for field the same names as in `client.base.EngineStatus`."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0  # choices in the queue, preempted ones included
    num_queued_tokens: int = 0  # tokens that the queue still has to prefill
    num_free_blocks: int = 0  # cached blocks that nobody uses count as free
    num_blocks: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_step_tokens: int = 0  # tokens that steps computed, prompts and output together
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)  # steps per bucket of STEP_TOKEN_BOUNDS
    refreshes: tuple[int, ...] = (0,) * len(REFRESH_SOURCES)  # commits by REFRESH_SOURCES
    refresh_us: tuple[int, ...] = (0,) * len(REFRESH_SOURCES)  # what they took, from begin to commit
    expert_balance_ppm: int = 0  # gauge, millionths, mean over layers; 0: no experts, as balance itself never is
    worst_expert_balance_ppm: int = 0  # gauge, of the worst layer
    num_expert_rebalances: int = 0
    num_expert_failures: int = 0
    num_expert_bytes: int = 0  # moved between ranks

    def as_integers(self) -> list[int]:
        """All numbers one after the other, as the status board keeps them."""
        integers: list[int] = []
        for value in msgspec.structs.astuple(self):
            integers.extend(value if isinstance(value, tuple) else (value,))
        return integers

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> EngineStats:
        values: list[int | tuple[int, ...]] = []
        start = 0
        for width in _WIDTHS:
            values.append(integers[start] if width is None else tuple(integers[start : start + width]))
            start += width or 1
        return cls(**dict(zip(cls.__struct_fields__, values, strict=True)))  # type: ignore[arg-type]


_WIDTHS = tuple(len(value) if isinstance(value, tuple) else None for value in msgspec.structs.astuple(EngineStats()))
