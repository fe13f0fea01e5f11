"""Counters of an engine, as it publishes them: `engine/core.py` makes them, the status board and `/metrics` show them.

Gauges are of this moment, `num_*_tokens`, `num_preemptions` and `prefix_*` are totals since the start. They hold no
times: whoever publishes them stamps the heartbeat.
"""

from __future__ import annotations

import msgspec


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
