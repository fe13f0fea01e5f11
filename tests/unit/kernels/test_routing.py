"""Which experts a token goes to and with what weights, against a plain definition; slots, replicas and counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.ops import RoutingSpec
from headrace.kernels.reference import BlasArithmetic, OrderedArithmetic
from headrace.kernels.reference.arithmetic import Arithmetic
from headrace.kernels.reference.experts import ReferenceExperts
from headrace.kernels.reference.routing import choose_experts

EXACT = OrderedArithmetic()


def plain(scores: np.ndarray, bias: np.ndarray | None, spec: RoutingSpec) -> tuple[list[int], list[float]]:
    """One token, in float64 and words: probabilities, groups, choice, weights."""
    x = scores.astype(np.float64)
    chances = 1 / (1 + np.exp(-x)) if spec.scoring == "sigmoid" else np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    worth = chances if bias is None else chances + bias
    size = len(worth) // spec.num_groups
    groups = [worth[g * size : (g + 1) * size] for g in range(spec.num_groups)]
    values = [sum(sorted(group, reverse=True)[: spec.num_per_group_score]) for group in groups]
    used = sorted(range(spec.num_groups), key=lambda g: (-values[g], g))[: spec.num_groups_used]
    candidates = [e for e in range(len(worth)) if e // size in used]
    chosen = sorted(candidates, key=lambda e: (-worth[e], e))[: spec.num_per_token]
    weights = [chances[e] for e in chosen]
    if spec.is_normalised:
        weights = [weight / max(sum(weights), spec.norm_floor) for weight in weights]
    return chosen, [weight * spec.scale for weight in weights]


@given(
    seed=st.integers(0, 2**32 - 1),
    has_bias=st.booleans(),
    fields=st.fixed_dictionaries(
        {
            "num_per_token": st.integers(1, 4),
            "scoring": st.sampled_from(["softmax", "sigmoid"]),
            "is_normalised": st.booleans(),
            "norm_floor": st.sampled_from([0.0, 1e-12, 0.9]),
            "scale": st.sampled_from([1.0, 2.5]),
        }
    ),
    groups=st.sampled_from([(1, 1, 1), (4, 2, 2), (3, 1, 1), (2, 2, 6)]),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_plain_definition(
    seed: int, has_bias: bool, fields: dict[str, Any], groups: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng(seed)
    spec = RoutingSpec(
        num_experts=12, num_groups=groups[0], num_groups_used=groups[1], num_per_group_score=groups[2], **fields
    )
    scores = rng.standard_normal((5, 12)).astype(np.float32)
    bias = (0.2 * rng.standard_normal(12)).astype(np.float32) if has_bias else None
    chosen, weights = choose_experts(EXACT, scores, bias, spec)
    for token in range(5):
        expected, expected_weights = plain(scores[token], bias, spec)
        assert chosen[token].tolist() == expected
        np.testing.assert_allclose(weights[token], expected_weights, rtol=1e-5)
        alone = choose_experts(EXACT, scores[token : token + 1], bias, spec)
        assert alone[1].tobytes() == weights[token].tobytes(), "the same bits alone"


@pytest.mark.parametrize("arithmetic", [BlasArithmetic(), OrderedArithmetic()], ids=["blas", "ordered"])
def test_of_equal_ones_the_lowest(arithmetic: Arithmetic) -> None:
    spec = RoutingSpec(num_experts=8, num_per_token=3)
    scores = np.zeros((2, 8), np.float32)
    scores[1, [5, 2]] = 1.0
    chosen, weights = choose_experts(arithmetic, scores, None, spec)
    assert chosen.tolist() == [[0, 1, 2], [2, 5, 0]]
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


def test_the_bias_takes_part_in_the_choice_alone() -> None:
    spec = RoutingSpec(num_experts=4, num_per_token=2, is_normalised=False)
    scores = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    chosen, weights = choose_experts(EXACT, scores, np.array([0, 0, 0, 0.35], np.float32), spec)
    assert chosen.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, [[0.1, 0.4]], rtol=1e-5)


def test_the_best_groups_alone_count() -> None:
    """Expert 0 is the best of all, but its group is not: the sum of two decides."""
    spec = RoutingSpec(
        num_experts=6, num_per_token=2, scoring="sigmoid", num_groups=3, num_groups_used=1, num_per_group_score=2
    )
    scores = np.array([[3.0, -9.0, 2.0, 2.5, 1.0, 1.0]], np.float32)
    assert choose_experts(EXACT, scores, None, spec)[0].tolist() == [[3, 2]]


def test_scores_that_are_no_numbers_choose_someone() -> None:
    spec = RoutingSpec(num_experts=4, num_per_token=2)
    chosen, _ = choose_experts(EXACT, np.full((1, 4), np.nan, np.float32), None, spec)
    assert chosen.tolist() == [[0, 1]]


def test_a_token_goes_to_the_replica_of_its_position() -> None:
    experts = ReferenceExperts(3)
    experts.place(np.array([2, 0, 1, 2, 2]), {})  # expert 2 has slots 0, 3 and 4
    chosen = np.array([[2, 0], [2, 1], [2, 0], [1, 2]])
    assert experts.slots(chosen, np.array([0, 1, 5, 6])).tolist() == [[0, 1], [3, 2], [4, 1], [2, 0]]
    assert experts.take_counts().tolist() == [2, 2, 2, 1, 1]
    assert experts.take_counts().tolist() == [0] * 5
    experts.slots(chosen, np.array([0, 1, 5, 6]))
    experts.place(np.arange(3), {})
    assert experts.take_counts().tolist() == [0] * 3, "another placement counts anew"
