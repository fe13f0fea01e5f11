"""Log probabilities against a float64 softmax, their order, ranks, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.runner.logprobs import rows_per_block, score


def reference(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("num_top", [0, 1, 5, 299, 300, 400, -1])
def test_rows_equal_a_float64_softmax(num_top: int) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((9, 300)) * 4).astype(np.float32)
    logits[:, 17] = logits[:, 200]  # a tie
    token_ids = rng.integers(0, 300, 9)
    rows = score(logits, token_ids, num_top)
    ids, values, ranks = rows.arrays()
    expected = reference(logits)
    width = 300 if num_top in (-1, 400) else num_top
    assert ids.shape == values.shape == (9, 1 + width)
    np.testing.assert_allclose(values, np.take_along_axis(expected, ids, 1), atol=3e-6)
    for i in range(9):
        order = sorted(range(300), key=lambda t: (-logits[i, t], t))
        assert ids[i].tolist() == [token_ids[i], *order[:width]]
        assert ranks[i] == order.index(token_ids[i]) + 1


def test_bits_do_not_depend_on_the_batch() -> None:
    logits = (np.random.default_rng(4).standard_normal((40, 5003)) * 5).astype(np.float32)
    token_ids = np.arange(40) * 100
    assert rows_per_block(5003) < 60
    together = score(logits, token_ids, 4).arrays()
    for i in range(40):
        alone = score(logits[i : i + 1].copy(), token_ids[i : i + 1], 4).arrays()
        assert all(a[0].tobytes() == t[i].tobytes() for a, t in zip(alone, together, strict=True))


def test_blocks_of_rows_join_without_a_seam() -> None:
    vocab_size = 150_000  # one row per block
    logits = np.random.default_rng(5).standard_normal((3, vocab_size)).astype(np.float32)
    assert rows_per_block(vocab_size) == 1
    _, values, _ = score(logits, np.array([1, 2, 3]), 0).arrays()
    np.testing.assert_allclose(values[:, 0], reference(logits)[[0, 1, 2], [1, 2, 3]], atol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    logits = np.array([[3e38, -3e38, 0.0]], np.float32)
    _, values, ranks = score(logits, np.array([1]), -1).arrays()
    assert np.isfinite(values).all()
    assert values[0, 1] == 0.0
    assert ranks[0] == 3
