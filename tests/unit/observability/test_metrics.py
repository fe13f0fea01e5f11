"""What a scrape shows: names, labels, sums, other servers' names for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.client.base import EngineStatus
from headrace.observability.aliases import ALIASES
from headrace.observability.prometheus import COUNTERS, HISTOGRAMS, PER_FRONT_END, Metrics
from headrace.observability.totals import Buckets

STATUS = EngineStatus(
    is_ready=True, num_running=2, num_waiting=3, num_free_blocks=16, num_blocks=64, num_preemptions=4,
    prefix_queries=100, prefix_hits=25, num_prompt_tokens=700, num_generated_tokens=900, weights_version="7",
)  # fmt: skip


def samples(*scrapes: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for metrics in scrapes:
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(values: dict[tuple[str, tuple[tuple[str, str], ...]], float], name: str) -> float:
    return sum(value for (series, _), value in values.items() if series == name)


def test_engine_series_come_from_the_status() -> None:
    values = samples(Metrics("m", lambda: STATUS))
    model = (("model_name", "m"),)
    assert values["headrace:num_requests_running", model] == 2
    assert values["headrace:num_requests_waiting", model] == 3
    assert values["headrace:kv_cache_usage_perc", model] == 0.75
    assert values["headrace:prefix_cache_queries_total", model] == 100
    assert values["headrace:prefix_cache_hits_total", model] == 25
    assert values["headrace:num_preemptions_total", model] == 4
    assert values["headrace:prompt_tokens_total", model] == 700
    assert values["headrace:generation_tokens_total", model] == 900
    assert values["headrace:weights_version_info", (*model, ("version", "7"))] == 1


def test_every_series_has_its_name() -> None:
    metrics = Metrics("m", lambda: STATUS)
    text = metrics.render().decode()
    for name in HISTOGRAMS:
        assert f"headrace:{name}_bucket" in text
    for name in COUNTERS:
        assert f"# TYPE headrace:{name}_total counter" in text
    assert "_created" not in text


def test_any_front_end_answers_for_all_and_counts_the_engine_once(tmp_path: Path) -> None:
    front_ends = [Metrics("m", lambda: STATUS, front_end=i, num_front_ends=4, directory=tmp_path) for i in range(4)]
    for index, metrics in enumerate(front_ends):
        for _ in range(10 * (index + 1)):
            metrics.count_finished("stop")
            metrics.observe("request_prompt_tokens", 5)
        metrics.count_aborts(f"reason-{index}", 2)
        metrics.observe("event_loop_lag_seconds", 0.1)
        metrics.observe("gc_pause_seconds", 0.001)
    scrapes = [samples(metrics) for metrics in front_ends]
    assert all(values == scrapes[0] for values in scrapes)
    values = scrapes[0]
    assert total(values, "headrace:request_success_total") == 100
    assert total(values, "headrace:request_prompt_tokens_count") == 100
    assert total(values, "headrace:request_prompt_tokens_sum") == 500
    assert total(values, "headrace:prompt_tokens_total") == 700
    assert total(values, "headrace:aborts_total") == 8
    lags = {
        dict(labels)["front_end"]: value
        for (name, labels), value in values.items()
        if name.endswith("lag_seconds_count")
    }
    assert lags == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert {name for (name, labels) in values if "front_end" in dict(labels)} == {
        f"headrace:{name}_{part}" for name in PER_FRONT_END for part in ("bucket", "count", "sum")
    }


def test_a_restarted_front_end_goes_on_where_its_predecessor_ended(tmp_path: Path) -> None:
    other = Metrics("m", lambda: STATUS, front_end=1, num_front_ends=2, directory=tmp_path)
    for count in (1, 2, 3):
        metrics = Metrics("m", lambda: STATUS, front_end=0, num_front_ends=2, directory=tmp_path)
        metrics.count_finished("stop")
        metrics.count_aborts("control", 2)
        metrics.observe("request_params_n", 4)
        values = samples(other)
        assert total(values, "headrace:request_success_total") == count
        assert total(values, "headrace:aborts_total") == 2 * count
        assert total(values, "headrace:request_params_n_sum") == 4 * count


def test_label_values_without_end_are_counted_together(tmp_path: Path) -> None:
    metrics = [Metrics("m", lambda: STATUS, front_end=0, directory=tmp_path) for _ in range(2)]
    for number in range(200):
        metrics[number % 2].count_aborts(f"reason-{number % 100}" + "x" * number)
    values = samples(metrics[0])
    assert 20 < len([name for name, _ in values if name == "headrace:aborts_total"]) < 30
    assert values["headrace:aborts_total", (("model_name", "m"), ("reason", "other"))] > 100


def test_buckets_count_up_to_and_with_their_bound() -> None:
    buckets = Buckets((1.0, 2.0))
    for value, weight in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        buckets.observe(value, weight)
    assert buckets.cumulative() == [("1.0", 3.0), ("2.0", 4.0), ("+Inf", 7.0)]
    assert buckets.total == 0.5 + 2.0 + 1.5 + 27.0


def test_reasons_are_labels() -> None:
    metrics = Metrics("m", lambda: STATUS)
    metrics.count_rejection("queue_full")
    metrics.count_aborts("disconnect", 3)
    metrics.count_aborts("control", 0)
    values = samples(metrics)
    model = ("model_name", "m")
    assert values["headrace:admission_rejections_total", (model, ("reason", "queue_full"))] == 1
    assert values["headrace:aborts_total", (model, ("reason", "disconnect"))] == 3
    assert ("headrace:aborts_total", (model, ("reason", "control"))) not in values


def test_experts_are_shown_where_there_are_any() -> None:
    status = EngineStatus(
        is_ready=True,
        expert_balance_ppm=912_500,
        worst_expert_balance_ppm=500_000,
        num_expert_rebalances=2,
        num_expert_failures=1,
        num_expert_bytes=1 << 40,
    )
    values, model = samples(Metrics("m", lambda: status)), ("model_name", "m")
    assert values["headrace:expert_balance", (model, ("stat", "mean"))] == 0.9125
    assert values["headrace:expert_balance", (model, ("stat", "worst"))] == 0.5
    assert values["headrace:expert_rebalances_total", (model,)] == 2
    assert values["headrace:expert_rebalance_failures_total", (model,)] == 1
    assert values["headrace:expert_moved_bytes_total", (model,)] == 1 << 40
    assert not any("expert" in name for name, _ in samples(Metrics("m", lambda: STATUS)))


def test_steps_and_refreshes() -> None:
    status = EngineStatus(
        is_ready=True,
        num_step_tokens=70,
        steps_by_tokens=(3, 0, 0, 0, 2, *[0] * 9),
        refreshes=(0, 0, 2, 0, 1, 0),
        refresh_us=(0, 0, 2_500_000, 0, 40, 0),
        weights_state="updating",
    )
    values = samples(Metrics("m", lambda: status))
    model = ("model_name", "m")
    steps = [
        values["headrace:iteration_tokens_total_bucket", (("le", le), model)] for le in ("1.0", "32.0", "64.0", "+Inf")
    ]
    assert steps == [3, 3, 5, 5]
    assert values["headrace:iteration_tokens_total_sum", (model,)] == 70
    assert values["headrace:weight_refresh_seconds_count", (model, ("source", "file"))] == 2
    assert values["headrace:weight_refresh_seconds_sum", (model, ("source", "file"))] == 2.5
    states = {
        dict(labels)["state"]: value for (name, labels), value in values.items() if name == "headrace:weights_state"
    }
    assert states == {"ready": 0, "asleep": 0, "updating": 1, "poisoned": 0}


@pytest.mark.parametrize("server", ALIASES)
def test_an_alias_is_the_same_series(server: str) -> None:
    metrics = Metrics("m", lambda: STATUS, aliases=(server, server))
    metrics.observe("time_to_first_token_seconds", 0.02)
    values = samples(metrics)
    for alias in ALIASES[server]:
        ours, theirs = (
            {
                (name.removeprefix(prefix), labels): value
                for (name, labels), value in values.items()
                if name.startswith(prefix)
            }
            for prefix in (f"headrace:{alias.of}", f"{server}:{alias.name}")
        )
        assert theirs
        assert theirs == ours or alias.only


def test_fastdeploy_counts_successes_alone() -> None:
    metrics = Metrics("m", lambda: STATUS, aliases=("fastdeploy",))
    for reason in ("stop", "stop", "length", "abort", "error"):
        metrics.count_finished(reason)
    assert samples(metrics)["fastdeploy:request_success_total", (("model_name", "m"),)] == 3
    assert "vllm:" not in metrics.render().decode()
