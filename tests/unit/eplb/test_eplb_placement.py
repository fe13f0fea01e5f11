"""The published algorithm: its example, its properties, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.eplb.layout import ExpertMap
from headrace.eplb.placement import Cluster, Strategy, pack, plan, planned_nodes, replicate
from headrace.eplb.stats import balance, rank_loads
from headrace.errors import ConfigError, InvalidRequest

# From the README of github.com/deepseek-ai/EPLB.
WEIGHT_LE = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
EIGHT = Cluster(num_ranks=8, num_nodes=2, num_groups=4)
FOUR = Cluster(num_ranks=4)


def balances(slots_LP: Any, num_ranks: int, weight_LE: Any = WEIGHT_LE) -> list[float]:
    return balance(rank_loads(weight_LE, ExpertMap(slots_LP, weight_LE.shape[1], num_ranks))).tolist()


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, Cluster]:
    """Loads of a few layers, slots, and a cluster that they fit on."""
    num_nodes = draw(st.sampled_from([1, 2, 3]))
    num_ranks = num_nodes * draw(st.integers(1, 4))
    num_experts = num_nodes * draw(st.integers(1, 6)) * draw(st.sampled_from([1, 2]))
    least = -(-num_experts // num_ranks)
    num_slots = num_ranks * draw(st.integers(least, least + 3))
    groups = [None, *(count for count in range(1, num_experts + 1) if num_experts % count == 0)]
    cluster = Cluster(num_ranks=num_ranks, num_nodes=num_nodes, num_groups=draw(st.sampled_from(groups)))
    load = st.one_of(st.just(0.0), st.integers(0, 50).map(float), st.floats(0, 1e12))
    rows = st.lists(load, min_size=num_experts, max_size=num_experts)
    return np.array(draw(st.lists(rows, min_size=1, max_size=3))), num_slots, cluster


def test_the_published_example_hierarchical() -> None:
    slots_LP = plan(WEIGHT_LE, 16, EIGHT)
    assert slots_LP.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    expert_map = ExpertMap(slots_LP, 12, 8)
    assert expert_map.num_replicas_LE.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    assert rank_loads(WEIGHT_LE, expert_map)[0].tolist() == [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]
    assert balances(slots_LP, 8) == pytest.approx([0.828, 0.805], abs=5e-4)


def test_the_published_example_global() -> None:
    slots_LP = plan(WEIGHT_LE, 16, EIGHT, Strategy.GLOBAL)
    assert slots_LP.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    assert balances(slots_LP, 8) == pytest.approx([0.932, 0.840], abs=5e-4)


def test_the_example_without_redundancy() -> None:
    assert balances(np.tile(np.arange(12), (2, 1)), 4) == pytest.approx([0.783, 0.560], abs=5e-4)
    assert balances(plan(WEIGHT_LE, 12, FOUR), 4) == pytest.approx([0.932, 0.990], abs=5e-4)


def test_intra_node_replicates_over_all_and_packs_the_slots_of_each_node() -> None:
    slots_LP = plan(WEIGHT_LE, 16, EIGHT, Strategy.INTRA_NODE)
    replicated_LP, _ = replicate(WEIGHT_LE.astype(float), 16)
    for node in (slice(0, 8), slice(8, 16)):
        assert np.array_equal(np.sort(slots_LP[:, node]), np.sort(replicated_LP[:, node]))
    assert min(balances(slots_LP, 8)) >= min(balances(replicated_LP, 8))


def test_hierarchical_keeps_a_group_on_one_node() -> None:
    slots_LP = plan(WEIGHT_LE, 16, EIGHT)
    for by_node in slots_LP.reshape(2, 2, 8) // 3:  # groups of three experts
        assert set(by_node[0]).isdisjoint(by_node[1])


def test_replicas_by_hand() -> None:
    expert_XP, copies_XE = replicate(np.array([[8.0, 12.0, 4.0]]), 6)
    # 12 halves to 6; then 8 to 4; then 6 (of two copies) to 4.
    assert expert_XP.tolist() == [[0, 1, 2, 1, 0, 1]]
    assert copies_XE.tolist() == [[2, 3, 1]]


def test_packing_by_hand() -> None:
    # 9 to bin 0, 7 to bin 1, 5 to bin 1 (7 < 9), which is full, so 1 goes to bin 0.
    assert pack(np.array([[7.0, 9.0, 1.0, 5.0]]), 2).tolist() == [[2, 0, 1, 3]]
    assert pack(np.array([[1.0, 9.0]]), 2).tolist() == [[0, 1]]  # one each: as they come


@given(problems(), st.sampled_from(Strategy), st.integers(-40, 40))
@settings(max_examples=60, deadline=None)
def test_properties(problem: tuple[np.ndarray, int, Cluster], strategy: Strategy, power: int) -> None:
    weight_LE, num_slots, cluster = problem
    slots_LP = plan(weight_LE, num_slots, cluster, strategy)
    expert_map = ExpertMap(slots_LP, weight_LE.shape[1], cluster.num_ranks)  # checks that each expert has a slot
    assert slots_LP.shape == (len(weight_LE), num_slots)
    assert (expert_map.num_replicas_LE.sum(axis=1) == num_slots).all()
    assert np.array_equal(plan(weight_LE * 2.0**power, num_slots, cluster, strategy), slots_LP)
    per_copy_LE = weight_LE / expert_map.num_replicas_LE
    assert (per_copy_LE.max(axis=1) <= weight_LE.max(axis=1)).all()
    for layer in range(len(weight_LE)):  # layers do not touch each other
        assert np.array_equal(plan(weight_LE[layer : layer + 1], num_slots, cluster, strategy)[0], slots_LP[layer])


@given(problems())
@settings(max_examples=50, deadline=None)
def test_no_other_split_of_the_same_copies_has_a_smaller_largest_share(
    problem: tuple[np.ndarray, int, Cluster],
) -> None:
    weight_LE, num_slots, _ = problem
    _, copies_LE = replicate(weight_LE, num_slots)
    for weight_E, copies_E in zip(weight_LE, copies_LE, strict=True):
        largest = (weight_E / copies_E).max()
        # With shares below it by ever so little, more copies would be needed than there are.
        if largest > 0:
            assert np.maximum(np.ceil(weight_E / (largest * (1 - 1e-6))), 1).sum() > num_slots


def test_layers_without_load_are_planned_as_if_all_experts_were_equal() -> None:
    silent = plan(np.zeros((2, 6)), 8, FOUR)
    assert np.array_equal(silent, plan(np.ones((2, 6)), 8, FOUR))
    assert ExpertMap(silent, 6, 4).num_replicas_LE.max() == 2


def test_huge_loads_do_not_overflow() -> None:
    weight_LE = np.full((1, 6), 1e308)
    weight_LE[0, 2] = 1.7e308
    assert np.array_equal(plan(weight_LE, 8, FOUR), plan(weight_LE / 2.0**900, 8, FOUR))


def test_ranks_that_do_not_divide_among_the_nodes_are_one_node() -> None:
    odd = Cluster(num_ranks=8, num_nodes=3, num_groups=4)
    assert planned_nodes(odd, Strategy.HIERARCHICAL) == 1
    assert planned_nodes(odd, Strategy.INTRA_NODE) == 1
    assert np.array_equal(plan(WEIGHT_LE, 16, odd), plan(WEIGHT_LE, 16, odd, Strategy.GLOBAL))


def test_without_groups_the_plan_is_global() -> None:
    none = Cluster(num_ranks=8, num_nodes=2)
    assert np.array_equal(plan(WEIGHT_LE, 16, none), plan(WEIGHT_LE, 16, none, Strategy.GLOBAL))
    each = Cluster(num_ranks=8, num_nodes=2, num_groups=12)  # as FastDeploy runs it
    assert not np.array_equal(plan(WEIGHT_LE, 16, each), plan(WEIGHT_LE, 16, none))


def test_groups_that_do_not_divide_among_the_nodes_make_the_plan_global() -> None:
    odd = Cluster(num_ranks=8, num_nodes=4, num_groups=6)
    assert np.array_equal(plan(WEIGHT_LE, 16, odd), plan(WEIGHT_LE, 16, odd, Strategy.GLOBAL))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ([[1.0, float("nan")]], "weight[0, 1] is nan"),
        ([[1.0, 2.0], [float("inf"), 1.0]], "weight[1, 0] is inf"),
        ([[1.0, -2.0]], "weight[0, 1] is -2"),
        ([1.0, 2.0], "shape [2]"),
        (np.zeros((0, 4)), "shape [0, 4]"),
        ([[1.0], [1.0, 2.0]], "weight must be"),
        ([["a", "b"]], "weight must be"),
    ],
)
def test_weights_that_are_no_loads(weight: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(weight, 4, FOUR)
    assert expected in caught.value.message
    assert caught.value.param == "weight"


@pytest.mark.parametrize(
    ("num_slots", "cluster", "expected"),
    [
        (8, FOUR, "num_slots is 8; it must be at least the number of experts, 12"),
        (14, FOUR, "num_slots is 14; it must be a multiple of num_ranks, 4"),
        (12, Cluster(num_ranks=4, num_groups=5), "num_groups is 5; it must divide the number of experts, 12"),
    ],
)
def test_sizes_that_do_not_fit(num_slots: int, cluster: Cluster, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(WEIGHT_LE, num_slots, cluster)


@pytest.mark.parametrize("name", ["num_ranks", "num_nodes", "num_groups"])
def test_sizes_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        Cluster(**{"num_ranks": 2, name: 0})
