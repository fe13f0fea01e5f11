"""The engine's series, read from its status at each scrape; the same from every front end. `prometheus.py` calls it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

PREFIX = "headrace:"
WEIGHTS_STATES = ("ready", "asleep", "updating", "poisoned")

GAUGES: dict[str, tuple[str, str]] = {
    "num_requests_running": ("Sequences in the running batch", "num_running"),
    "num_requests_waiting": ("Sequences that wait to be scheduled", "num_waiting"),
    "kv_cache_usage_perc": ("Share of the KV blocks in use, 1 is all", "kv_usage"),
    "num_kv_blocks": ("KV blocks", "num_blocks"),
    "num_free_kv_blocks": (
        "KV blocks that a new request can have, those of idle cached prefixes too",
        "num_free_blocks",
    ),
}
COUNTERS: dict[str, tuple[str, str]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", "prefix_queries"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", "prefix_hits"),
    "num_preemptions": ("Preempted sequences", "num_preemptions"),
    "prompt_tokens": ("Prompt tokens of accepted requests", "num_prompt_tokens"),
    "generation_tokens": ("Generated tokens", "num_generated_tokens"),
}
EXPERT_COUNTERS: dict[str, tuple[str, str]] = {
    "expert_rebalances": ("Changes of the expert map that are in force or were", "num_expert_rebalances"),
    "expert_rebalance_failures": ("Changes of the expert map that failed", "num_expert_failures"),
    "expert_moved_bytes": ("Bytes of experts that were moved between ranks", "num_expert_bytes"),
}
"""Name: documentation, and the field of EngineNumbers."""


class EngineNumbers(Protocol):
    """The part of the client's EngineStatus that is exported."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_generated_tokens(self) -> int: ...
    @property
    def num_step_tokens(self) -> int: ...
    @property
    def step_buckets(self) -> Sequence[tuple[float, int]]: ...
    @property
    def refresh_seconds(self) -> Mapping[str, tuple[int, float]]: ...
    @property
    def expert_balance(self) -> Mapping[str, float]: ...
    @property
    def num_expert_rebalances(self) -> int: ...
    @property
    def num_expert_failures(self) -> int: ...
    @property
    def num_expert_bytes(self) -> int: ...
    @property
    def weights_version(self) -> str: ...
    @property
    def weights_state(self) -> str: ...


def collect_engine(status: EngineNumbers, labels: Mapping[str, str]) -> Iterable[Metric]:
    names, values = list(labels), list(labels.values())
    for name, (documentation, field) in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, documentation, labels=names)
        gauge.add_metric(values, getattr(status, field))
        yield gauge
    counters = {**COUNTERS, **(EXPERT_COUNTERS if status.expert_balance else {})}
    for name, (documentation, field) in counters.items():
        counter = CounterMetricFamily(PREFIX + name, documentation, labels=names)
        counter.add_metric(values, getattr(status, field))
        yield counter
    if status.expert_balance:
        documentation = "Mean over ranks / most of any rank of the tokens in experts, of layers; 1 is even"
        balance = GaugeMetricFamily(PREFIX + "expert_balance", documentation, labels=[*names, "stat"])
        for stat, value in status.expert_balance.items():
            balance.add_metric([*values, stat], value)
        yield balance
    steps = HistogramMetricFamily(PREFIX + "iteration_tokens_total", "Tokens that a step computed", labels=names)
    bounds, counts = zip(*status.step_buckets, strict=True)
    labelled = ["+Inf" if bound == float("inf") else str(float(bound)) for bound in bounds]
    cumulative = list(zip(labelled, map(float, itertools.accumulate(counts)), strict=True))
    steps.add_metric(values, cumulative, status.num_step_tokens)
    yield steps
    yield from _collect_weights(status, names, values)


def _collect_weights(status: EngineNumbers, names: list[str], values: list[str]) -> Iterable[Metric]:
    documentation = "Committed refreshes, from begin to commit, by the kind of their source"
    refreshes = SummaryMetricFamily(PREFIX + "weight_refresh_seconds", documentation, labels=[*names, "source"])
    for source, (count, seconds) in status.refresh_seconds.items():
        refreshes.add_metric([*values, source], count, seconds)
    yield refreshes
    version = GaugeMetricFamily(PREFIX + "weights_version_info", "Version of the weights", labels=[*names, "version"])
    version.add_metric([*values, status.weights_version], 1)
    yield version
    states = GaugeMetricFamily(
        PREFIX + "weights_state", "1 for the state that the weights are in", labels=[*names, "state"]
    )
    for state in WEIGHTS_STATES:
        states.add_metric([*values, state], float(state == status.weights_state))
    yield states
