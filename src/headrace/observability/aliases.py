"""Other servers' names for our series (`--metrics-alias`), so that dashboards made for those go on showing numbers.

Only true counterparts are here: what the other server counts otherwise, or counts and we do not, has no alias.
docs/observability.md lists what is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from headrace.observability.engine_series import PREFIX


@dataclass(frozen=True, slots=True)
class Alias:
    """`of`: our name, without prefix and `_total`. `only`: values of `label` that count, added up without it."""

    name: str
    of: str
    label: str = ""
    only: tuple[str, ...] = ()


def _same(*names: str) -> tuple[Alias, ...]:
    return tuple(Alias(name, name) for name in names)


_SHARED = _same(
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens",
    "generation_tokens",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
ALIASES: Mapping[str, tuple[Alias, ...]] = {
    "vllm": (
        *_SHARED,
        *_same(
            "kv_cache_usage_perc",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "num_preemptions",
            "request_success",
            "request_params_n",
            "iteration_tokens_total",
            "inter_token_latency_seconds",
        ),
        # names of older versions, which dashboards still ask for
        Alias("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        Alias("time_per_output_token_seconds", "inter_token_latency_seconds"),
    ),
    "fastdeploy": (
        *_SHARED,
        Alias("request_success", "request_success", label="finished_reason", only=("stop", "length")),
        Alias("time_per_output_token_seconds", "inter_token_latency_seconds"),
        Alias("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        Alias("batch_size", "num_requests_running"),
        Alias("max_gpu_block_num", "num_kv_blocks"),
        Alias("available_gpu_block_num", "num_free_kv_blocks"),
        Alias("prefix_cache_token_num", "prefix_cache_hits"),
        Alias("prefix_gpu_cache_token_num", "prefix_cache_hits"),
    ),
}


def collect_aliases(server: str, families: Iterable[Metric]) -> Iterable[Metric]:
    """The families again, under the names of `server`."""
    by_name = {family.name: family for family in families}
    for alias in ALIASES[server]:
        yield _renamed(by_name[PREFIX + alias.of], f"{server}:{alias.name}", alias)


def _renamed(family: Metric, name: str, alias: Alias) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    samples: list[Sample] = family.samples
    if alias.only:
        samples = _added_up(samples, alias)
    renamed.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in samples]
    return renamed


def _added_up(samples: Iterable[Sample], alias: Alias) -> list[Sample]:
    totals: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in samples:
        if sample.labels[alias.label] in alias.only:
            labels = tuple(item for item in sample.labels.items() if item[0] != alias.label)
            totals[sample.name, labels] += sample.value
    return [Sample(name, dict(labels), value) for (name, labels), value in totals.items()]
