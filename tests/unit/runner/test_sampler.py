"""The sampler against a slow scalar one, its distribution, and its independence of the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runner import sampler
from headrace.runner.edits import LogitEdits
from headrace.runner.random import uniform
from headrace.runner.sampler import SamplingRows, sample
from headrace.types import SamplingParams

SLACK = 2e-5  # of a float32 softmax against a float64 one


def choose(logits: np.ndarray, rows: SamplingRows) -> tuple[np.ndarray, dict[int, str]]:
    best, finite = logits.argmax(axis=1).tolist(), np.isfinite(logits).all(axis=1).tolist()
    token_ids, errors = sample(logits, rows, best, finite, sampler.draw)
    return np.array(token_ids), errors


def rows_of(
    params: list[SamplingParams], seeds: list[int], positions: list[int], edits: dict[int, Any] | None = None
) -> SamplingRows:
    return SamplingRows(params=params, seeds=seeds, positions=positions, edits=edits or {})


def draw_many(row: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """One row drawn under `count` seeds."""
    logits = np.broadcast_to(row, (count, row.shape[0])).copy()
    token_ids, errors = choose(logits, rows_of([params] * count, list(range(count)), [5] * count))
    assert not errors
    return token_ids


def intervals(row: list[float], params: SamplingParams, slack: float) -> list[tuple[int, float, float]]:
    """Scalar reference: (token, from, to) of the unit interval; by id without truncation, else by falling probability.

    `slack` moves the borders of min-p and top-p, where float32 and float64 may differ.
    """
    best = max(row)
    weight = {i: math.exp((x - best) / params.temperature) for i, x in enumerate(row)}
    order = sorted(weight, key=lambda i: (-row[i], i))
    weight = {i: w for i, w in weight.items() if w >= params.min_p - slack}
    is_truncated = params.top_p < 1 or 0 < params.top_k < len(row)
    order = [i for i in order if i in weight] if is_truncated else sorted(weight)
    if 0 < params.top_k < len(row):
        order = order[: params.top_k]
    total = sum(weight[i] for i in order)
    if params.top_p < 1:
        running = 0.0
        for n, i in enumerate(order):
            running += weight[i] / total
            if running >= params.top_p + slack:
                order = order[: n + 1]
                break
        total = sum(weight[i] for i in order)
    edges = np.cumsum([0.0] + [weight[i] / total for i in order])
    return [(i, float(edges[n]), float(edges[n + 1])) for n, i in enumerate(order)]


def agrees(token: int, chance: float, row: list[float], params: SamplingParams) -> bool:
    return any(
        low - SLACK <= chance <= high + SLACK
        for slack in (-SLACK, 0.0, SLACK)
        for i, low, high in intervals(row, params, slack)
        if i == token
    )


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
)
# Halves: many ties, and never two logits so near that float32 and float64 order them differently.
LOGITS = st.lists(st.integers(-12, 12).map(lambda v: v / 2), min_size=2, max_size=30)


@given(LOGITS, st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 10**6)), min_size=1, max_size=6))
def test_every_row_agrees_with_the_scalar_reference(
    row: list[float], cases: list[tuple[SamplingParams, int, int]]
) -> None:
    params, seeds, positions = map(list, zip(*cases, strict=True))
    logits = np.array([row] * len(cases), np.float32)
    token_ids, errors = choose(logits, rows_of(params, seeds, positions))
    assert not errors
    chances = map(uniform, seeds, positions)
    for token, chance, p in zip(token_ids.tolist(), chances, params, strict=True):
        assert agrees(token, chance, row, p), (token, chance, p)
    assert logits.tobytes() == np.array([row] * len(cases), np.float32).tobytes(), "logits were changed"


@given(st.integers(0, 2**32), st.integers(1, 17), st.sampled_from([7, 256, 1000, 5003]))
@settings(max_examples=30)
def test_a_row_does_not_depend_on_its_neighbours(seed: int, num_rows: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.8, 1.7])),
            top_k=int(rng.choice([0, 3])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.01])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
        )
        for _ in range(num_rows)
    ]
    seeds, positions = rng.integers(0, 2**60, num_rows).tolist(), rng.integers(1, 500, num_rows).tolist()
    text = np.array([1, 2, 3, 5], np.int32)
    edits = [(LogitEdits(p, text, 2, vocab_size, ()), text) if LogitEdits.needed(p) else None for p in params]
    together, _ = choose(logits, rows_of(params, seeds, positions, {i: e for i, e in enumerate(edits) if e}))
    for i, e in enumerate(edits):
        alone, _ = choose(
            logits[i : i + 1].copy(), rows_of([params[i]], [seeds[i]], [positions[i]], {0: e} if e else {})
        )
        assert alone[0] == together[i]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, min_p=0.05),
        SamplingParams(top_k=6),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(top_k=9, top_p=0.9, min_p=0.01),
    ],
)
def test_distribution(params: SamplingParams) -> None:
    row = (np.random.default_rng(3).standard_normal(300) * 2).astype(np.float32)
    count = 20_000
    observed = np.bincount(draw_many(row, params, count), minlength=300)
    expected = np.zeros(300)
    for i, low, high in intervals(row.tolist(), params, 0.0):
        expected[i] = (high - low) * count
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    chi_square = ((observed[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = max(often.sum() - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_lowest_of_equal_ids_and_small_temperatures_are_greedy() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    for temperature in (0.0, 1e-8, 1e-300):
        assert (draw_many(row, SamplingParams(temperature=temperature), 20) == 1).all()
    assert set(draw_many(row, SamplingParams(temperature=2e-5), 50).tolist()) == {1, 2}


def test_extreme_temperatures_and_logits_do_not_overflow() -> None:
    row = np.array([3e38, -3e38, 1.0, 2.0], np.float32)
    assert (draw_many(row, SamplingParams(temperature=1.0), 20) == 0).all()
    assert (draw_many(row, SamplingParams(temperature=1e-4, top_p=0.9), 20) == 0).all()
    mild = np.array([1.0, 2.0, -3.0, 0.0], np.float32)
    for temperature in (1e12, 1e300):
        assert set(draw_many(mild, SamplingParams(temperature=temperature), 200).tolist()) == {0, 1, 2, 3}
        assert set(draw_many(mild, SamplingParams(temperature=temperature, top_k=2), 200).tolist()) == {0, 1}


def test_tiny_top_p_and_min_p_of_one_keep_the_best() -> None:
    row = np.array([0.0, 1.0, 1.5, 1.5], np.float32)
    assert (draw_many(row, SamplingParams(top_p=1e-12), 50) == 2).all()
    assert set(draw_many(row, SamplingParams(min_p=1.0), 50).tolist()) == {2, 3}


def test_ties_at_the_border_go_to_lower_ids() -> None:
    row = np.zeros(1000, np.float32)
    assert set(draw_many(row, SamplingParams(top_k=3), 200).tolist()) == {0, 1, 2}
    assert draw_many(row, SamplingParams(top_p=0.01), 500).max() == 9


def test_masked_tokens_are_never_drawn() -> None:
    allowed = [4, 700]
    bad = tuple((i,) for i in range(1000) if i not in allowed)
    for params in (
        SamplingParams(bad_words_token_ids=bad),
        SamplingParams(bad_words_token_ids=bad, temperature=1e300),
        SamplingParams(bad_words_token_ids=bad, top_k=50),
        SamplingParams(bad_words_token_ids=bad, top_p=0.999999),
        SamplingParams(bad_words_token_ids=bad, temperature=0.0),
    ):
        text = np.array([1], np.int32)
        edit = (LogitEdits(params, text, 1, 1000, ()), text)
        logits = np.zeros((64, 1000), np.float32)
        rows = rows_of([params] * 64, list(range(64)), [1] * 64, dict.fromkeys(range(64), edit))
        assert set(choose(logits, rows)[0].tolist()) <= set(allowed)


def test_failed_rows_are_named_and_leave_the_others_alone() -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.0, 1.0, 0.0, 1.0)]
    logits = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    clean, _ = choose(logits, rows_of(params, [9] * 6, [1] * 6))
    logits[1, 7], logits[2, 0], logits[4, 49] = np.nan, np.inf, -np.inf
    everything = SamplingParams(bad_words_token_ids=tuple((i,) for i in range(50)))
    text = np.array([1], np.int32)
    edits = {i: (LogitEdits(everything, text, 1, 50, ()), text) for i in (4, 5)}
    token_ids, errors = choose(logits, rows_of(params, [9] * 6, [1] * 6, edits))
    assert errors == {
        1: sampler.NOT_FINITE,
        2: sampler.NOT_FINITE,
        4: sampler.NOT_FINITE,
        5: sampler.ALL_BANNED,
    }
    assert token_ids[[0, 3]].tolist() == clean[[0, 3]].tolist()


def test_a_finite_row_whose_sum_overflows_is_no_error() -> None:
    logits = np.full((2, 64), 3e38, np.float32)
    logits[0, 5] = 3.1e38
    token_ids, errors = choose(logits, rows_of([SamplingParams(temperature=0.0)] * 2, [0, 0], [1, 1]))
    assert not errors
    assert token_ids.tolist() == [5, 0]


def test_seeds_and_positions_change_the_draw() -> None:
    row = np.zeros(1000, np.float32)
    logits = np.stack([row] * 4)
    token_ids, _ = choose(logits, rows_of([SamplingParams()] * 4, [1, 2, 1, 1], [5, 5, 6, 5]))
    assert token_ids[0] == token_ids[3]
    assert len(set(token_ids.tolist())) == 3
