"""What a simulation says: on loads worked out by hand, on Zipf's, and on the published example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.eplb.placement import Cluster, Strategy
from headrace.eplb.simulate import ZipfLoads, possible_counts, published_example, simulate, windows_of
from headrace.errors import ConfigError

SMALL = ZipfLoads(num_steps=8, num_layers=3, num_experts=16, window_steps=2, tokens_per_step=200, top_k=2, seed=5)


def test_a_plan_is_judged_on_the_next_window() -> None:
    # What the first window calls for is the worst for the second.
    windows_WLE = np.array([[[60, 30, 5, 5]], [[60, 5, 30, 5]]])
    row = simulate(windows_WLE, 0, Cluster(num_ranks=2), Strategy.GLOBAL)
    assert row.planned_mean == pytest.approx(50 / 65)  # 60 + 5, 30 + 5
    assert row.mean in (pytest.approx(50 / 65), pytest.approx(50 / 90))
    assert row.plain_mean == pytest.approx(50 / 65)
    assert (row.num_ranks, row.num_redundant, row.slots_per_rank, row.moved_share) == (2, 0, 2, 0.0)


def test_redundant_experts_and_steady_loads() -> None:
    windows_WLE = np.tile(np.array([[60, 20, 20, 20], [30, 30, 30, 30]]), (3, 1, 1))
    none, two = (simulate(windows_WLE, count, Cluster(num_ranks=2), Strategy.GLOBAL) for count in (0, 2))
    assert none.mean == pytest.approx((60 / 80 + 1) / 2)
    assert none.worst == pytest.approx(60 / 80)
    assert two.mean == two.planned_mean == pytest.approx(1.0)  # six slots of 20; 30, 15 and 15 on each rank
    assert two.moved_share == 0.0  # the second plan is the first


def test_zipf() -> None:
    loads_TLE = SMALL.generate()
    assert loads_TLE.shape == (8, 3, 16)
    assert (loads_TLE.sum(axis=2) == 400).all()
    assert np.array_equal(loads_TLE, SMALL.generate())
    steady = ZipfLoads(
        num_steps=40,
        num_layers=2,
        num_experts=16,
        window_steps=10,
        tokens_per_step=5000,
        top_k=1,
        exponent=1.0,
        drift=0.0,
    )
    share = np.sort(steady.generate().sum(axis=0) / 200_000, axis=1)[:, ::-1]
    expected = 1 / np.arange(1, 17)
    assert share == pytest.approx(np.tile(expected / expected.sum(), (2, 1)), abs=0.005)


def test_no_expert_gets_a_token_twice() -> None:
    steep = ZipfLoads(num_steps=4, num_layers=2, num_experts=8, tokens_per_step=10_000, top_k=4, exponent=5.0)
    assert steep.generate().max() < 10_000 * 1.05
    everyone = ZipfLoads(num_steps=2, num_layers=1, num_experts=4, tokens_per_step=1000, top_k=4, exponent=2.0)
    assert everyone.generate() == pytest.approx(np.full((2, 1, 4), 1000), rel=0.15)


def test_drift_changes_who_is_popular() -> None:
    def similarity(drift: float) -> float:
        fields: dict[str, Any] = {"num_steps": 40, "num_layers": 4, "num_experts": 64, "window_steps": 20}
        first, second = windows_of(ZipfLoads(**fields, drift=drift).generate(), 20)
        return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])

    assert similarity(0.0) > similarity(0.3) > similarity(1.0)
    assert similarity(0.0) > 0.99


def test_windows_drop_what_is_left_over() -> None:
    loads_TLE = np.arange(5).reshape(5, 1, 1)
    assert windows_of(loads_TLE, 2).ravel().tolist() == [0 + 1, 2 + 3]
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=f"window is {wrong} steps; it must be 1 to 2"):
            windows_of(loads_TLE, wrong)


def test_counts_that_do_not_divide_are_told_apart() -> None:
    possible, why = possible_counts(12, [0, 2, 4, 6, 8], 4)
    assert possible == [0, 4, 8]
    assert why is not None
    assert why.startswith("num_redundant_experts is 2")
    assert possible_counts(12, [0, 4], 4) == ([0, 4], None)


def test_the_published_example_comes_out_as_published() -> None:
    for example in published_example():
        assert example.computed == pytest.approx(example.published, abs=5e-4), example.name


def test_one_window_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        simulate(np.ones((1, 2, 4), dtype=np.int64), 0, Cluster(num_ranks=2), Strategy.GLOBAL)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_steps": 0}, "num_steps is 0"),
        ({"top_k": 300}, "top_k is 300; it must be 1 to the number of experts, 256"),
        ({"exponent": -1.0}, "zipf_exponent is -1.0"),
        ({"exponent": float("nan")}, "zipf_exponent is nan"),
        ({"drift": 1.5}, "drift is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_loads_that_cannot_be(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ZipfLoads(**changes)
