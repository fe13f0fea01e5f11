"""The compiled draw against the numpy one, which tests/unit/runner holds against a scalar one.

Weights are rounded differently, so a draw may differ where its chance, or what top-p and min-p compare with, lies
within 1e-6 of a border. Everywhere else the token is the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from headrace.kernels.ops import Draw
from headrace.runner import sampler
from headrace.runner.ordering import falling

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native import _native
from headrace.kernels.native.backend import NativeBackend

pytestmark = pytest.mark.usefixtures("instruction_set")
NEAR = 1e-6
WIDTHS = [2, 15, 16, 31, 255, 256, 257, 1000, 5003]


def row_of(rng: np.random.Generator, width: int) -> np.ndarray:
    """Smooth, peaked, full of ties, or mostly banned."""
    row = (rng.standard_normal(width) * rng.choice([0.1, 2.0, 8.0])).astype(np.float32)
    match rng.integers(5):
        case 0:
            row = np.round(row)
        case 1:
            row[rng.random(width) < 0.9] = -np.inf
            row[rng.integers(width)] = 1.0
        case 2:
            row[rng.integers(width, size=3)] += 20
    return row


def draw_of(rng: np.random.Generator, row: np.ndarray) -> Draw:
    return Draw(
        row,
        int(row.argmax()),
        temperature=float(rng.choice([1e-5, 0.05, 0.7, 0.8, 1.0, 3.0, 1e6])),
        top_k=int(rng.choice([-1, 0, 0, 0, 1, 2, 50, 400, 10**6])),
        top_p=float(rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 1e-9])),
        min_p=float(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0])),
        chance=float(rng.random()),
    )


def is_near_a_border(draw: Draw) -> bool:
    """Whether the answer hangs on the rounding of a weight."""
    row = draw.row_V.astype(np.float64)
    weights = np.exp((row - row.max()) / draw.temperature)
    if draw.min_p > 0 and (abs(weights - draw.min_p) < NEAR)[weights < 1].any():
        return True
    weights[weights < draw.min_p] = 0
    is_ordered = draw.top_p < 1 or 0 < draw.top_k < len(row)
    if is_ordered:
        weights = weights[falling(draw.row_V)]
    if 0 < draw.top_k < len(row):
        weights = weights[: draw.top_k]
    running = np.cumsum(weights) / weights.sum()
    if draw.top_p < 1:
        if (abs(running - draw.top_p) < NEAR).any():
            return True
        running = running[: running.searchsorted(draw.top_p) + 1]
        running = running / running[-1]
    return bool((abs(running - draw.chance) < NEAR).any())


@pytest.mark.parametrize("width", [*WIDTHS, 49152])
def test_draws_as_numpy_does(rng: np.random.Generator, width: int) -> None:
    backend = NativeBackend(2)
    num_draws = 60 if width > 10000 else 1500
    draws = [draw_of(rng, row_of(rng, width)) for _ in range(num_draws)]
    num_skipped = 0
    for draw, token, expected in zip(draws, backend.draw(draws), sampler.draw(draws), strict=True):
        if token != expected:
            assert is_near_a_border(draw), (draw[1:], token, expected)
            num_skipped += 1
    assert num_skipped <= 1 + num_draws // 100


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draw_depends_on_nothing_beside_it(rng: np.random.Generator, width: int) -> None:
    draws = [draw_of(rng, row_of(rng, width)) for _ in range(100)]
    alone = [token for draw in draws for token in NativeBackend(1).draw([draw])]
    for num_threads in (1, 2, 5):
        backend = NativeBackend(num_threads)
        assert backend.draw(draws) == alone
        assert backend.draw(draws[::-1]) == alone[::-1]


@pytest.mark.parametrize("chance", [1e-16, 0.5, 1 - 1e-16])
def test_extremes(chance: float) -> None:
    """Chances at the ends, logits that overflow when they are subtracted, temperatures that make all alike."""
    backend = NativeBackend(1)
    row = np.full(300, -np.inf, np.float32)
    row[[7, 299]] = 3e38, -3e38
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.9), (5, 0.9), (299, 0.5)):
        for temperature in (1e-5, 1.0, 1e300):
            assert backend.draw([Draw(row, 7, temperature, top_k, top_p, 0.0, chance)]) == [7]
    equal = np.zeros(300, np.float32)
    expected = sampler.draw([Draw(equal, 0, 1e300, k, 1.0, 0.0, chance) for k in (0, 3)])
    assert backend.draw([Draw(equal, 0, 1e300, k, 1.0, 0.0, chance) for k in (0, 3)]) == expected


def test_no_draws_and_a_best_token_outside_the_row() -> None:
    assert NativeBackend(1).draw([]) == []
    for best in (-1, 4):
        with pytest.raises(ValueError, match="best token"):
            _native.draw(_native.Pool(1, False), [Draw(np.zeros(4, np.float32), best, 1.0, 0, 1.0, 0.0, 0.5)])
