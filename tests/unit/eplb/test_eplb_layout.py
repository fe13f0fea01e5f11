"""Maps: the initial one, their derived tables, JSON, and what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.eplb.layout import ExpertMap, initial_map
from headrace.errors import ConfigError, InvalidRequest


@st.composite
def maps(draw: st.DrawFn) -> ExpertMap:
    num_experts, num_ranks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    least = -(-num_experts // num_ranks)
    num_slots = num_ranks * draw(st.integers(least, least + 3))
    num_layers = draw(st.integers(1, 3))
    rows = []
    for _ in range(num_layers):
        extra = st.lists(
            st.integers(0, num_experts - 1), min_size=num_slots - num_experts, max_size=num_slots - num_experts
        )
        rows.append(draw(st.permutations([*range(num_experts), *draw(extra)])))
    return ExpertMap(np.array(rows), num_experts, num_ranks)


def test_initial_map() -> None:
    expert_map = initial_map(2, 6, 10, 4)
    assert expert_map.slots_LP.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]] * 2
    assert (expert_map.num_layers, expert_map.num_slots, expert_map.num_redundant) == (2, 16, 10)
    assert expert_map.slots_LRS[0].tolist() == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5], [0, 1, 2, 3]]
    assert expert_map.num_replicas_LE[1].tolist() == [3, 3, 3, 3, 2, 2]
    assert expert_map.replicas_LEC[0].tolist() == [
        [0, 6, 12],
        [1, 7, 13],
        [2, 8, 14],
        [3, 9, 15],
        [4, 10, -1],
        [5, 11, -1],
    ]


@given(maps())
@settings(max_examples=80, deadline=None)
def test_slots_and_replicas_are_inverse(expert_map: ExpertMap) -> None:
    for layer in range(expert_map.num_layers):
        found = np.full(expert_map.num_slots, -1)
        for expert, slots in enumerate(expert_map.replicas_LEC[layer]):
            count = expert_map.num_replicas_LE[layer, expert]
            assert (slots[count:] == -1).all()
            assert (np.diff(slots[:count]) > 0).all()
            found[slots[:count]] = expert
        assert np.array_equal(found, expert_map.slots_LP[layer])


@given(maps())
@settings(max_examples=30, deadline=None)
def test_json_and_back(expert_map: ExpertMap) -> None:
    back = ExpertMap.from_json(expert_map.to_json())
    assert back == expert_map
    assert back.slots_LP.dtype == np.int32


def test_maps_differ_by_slots_and_ranks() -> None:
    expert_map = initial_map(1, 4, 0, 2)
    assert expert_map != ExpertMap(expert_map.slots_LP, 4, 4)
    assert expert_map != ExpertMap(expert_map.slots_LP[:, ::-1], 4, 2)
    assert expert_map != "a map"


def test_a_map_cannot_be_written_from_outside() -> None:
    slots_LP = np.array([[0, 1]], dtype=np.int32)
    expert_map = ExpertMap(slots_LP, 2, 2)
    slots_LP[0, 0] = 1
    assert expert_map.slots_LP.tolist() == [[0, 1]]
    for array in (expert_map.slots_LP, expert_map.replicas_LEC, expert_map.num_replicas_LE):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize(
    ("slots", "num_experts", "num_ranks", "expected"),
    [
        ([[0, 1, 1]], 2, 2, "num_ranks is 2; it must divide the 3 slots"),
        ([[0, 1]], 2, 0, "num_ranks is 0"),
        ([[0, 1]], 3, 2, "num_experts is 3; it must be 1 to 2"),
        ([[0, 1], [0, 2]], 2, 2, r"slots\[1\]\[1\] is 2; it must be 0 to 1"),
        ([[0, 1], [-1, 0]], 2, 2, r"slots\[1\]\[0\] is -1"),
        ([[0, 1], [0, 0]], 2, 2, r"slots\[1\] hold no copy of expert 1"),
        ([0, 1], 2, 2, r"shape \[2\]"),
    ],
)
def test_what_is_no_map(slots: Any, num_experts: int, num_ranks: int, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        ExpertMap(np.array(slots), num_experts, num_ranks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"num_experts": 2, "num_ranks": 2, "slots": [[0, 1.5]]}',
        '{"num_experts": 2, "num_ranks": 2, "slots": [[0, 1], [0]]}',
        '{"num_experts": 2, "num_ranks": 2, "slots": []}',
        '{"num_experts": 2, "num_ranks": 2, "slots": [[0, 99999999999]]}',
        '{"num_experts": 2, "num_ranks": 2, "slots": [[0, 1]], "x": 1}',
        '{"num_experts": 2, "slots": [[0, 1]]}',
    ],
)
def test_json_that_is_no_map(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ExpertMap.from_json(text)
    assert caught.value.param == "slots"


@pytest.mark.parametrize(
    ("num_experts", "num_redundant", "num_ranks", "allowed"),
    [
        (256, 8, 64, "allowed: 0, 64, 128, 192, ... (at most 16128)"),
        (6, 0, 4, "allowed: 2, 6, 10, 14, ... (at most 18)"),
        (4, -1, 2, "allowed: 0, 2, 4 (at most 4)"),
        (4, 6, 2, "allowed: 0, 2, 4 (at most 4)"),
        (3, 1, 1, "allowed: 0 (at most 0)"),
    ],
)
def test_redundant_counts_that_cannot_be(num_experts: int, num_redundant: int, num_ranks: int, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        initial_map(1, num_experts, num_redundant, num_ranks)
    assert str(caught.value).startswith(f"num_redundant_experts is {num_redundant}: {num_experts} experts")
    assert str(caught.value).endswith(allowed)


@pytest.mark.parametrize("sizes", [(0, 4, 0, 2), (1, 0, 0, 2), (1, 4, 0, 0)])
def test_sizes_that_cannot_be(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        initial_map(*sizes)
