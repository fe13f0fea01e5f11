"""`reference-exact`: logits are bitwise equal alone, in a batch and with any chunking; and its sums are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.kernels import create_backend
from headrace.kernels.ops import AttentionSpec
from headrace.kernels.reference import BlasArithmetic, OrderedArithmetic
from headrace.kernels.reference.arithmetic import Arithmetic
from headrace.kernels.reference.ordered import tree_sum
from headrace.models import load_model
from headrace.testing.steps import Runner
from headrace.testing.tiny import write_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma3_text": {"sliding_window": 6, "final_logit_softcapping": 5.0, "num_layers": 3, "sliding_window_pattern": 2},
    "qwen3": {"hidden_act": "gelu"},
    "ernie4_5_moe": {"num_experts": 6, "num_experts_per_token": 3},
}
LENGTHS = (37, 5, 21, 1)


@pytest.fixture(scope="module", params=list(MODELS))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("exact")
    write_tiny_model(folder, architecture=request.param, **MODELS[request.param])
    backend = create_backend("reference-exact")
    return Runner(load_model(folder, backend), backend)


def restart(runner: Runner, seed: int) -> None:
    """All blocks are free again, in another order."""
    runner.__init__(runner.model, runner.backend, seed=seed)  # type: ignore[misc]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), largest=st.integers(1, 40))
def test_same_bits_in_any_batch(runner: Runner, seed: int, largest: int) -> None:
    """Chunks of up to `largest` tokens, sequences in and out of the batch, blocks anywhere: all from the seed."""
    tokens = np.random.default_rng(0).integers(0, 272, (len(LENGTHS), max(LENGTHS)))
    sequences = [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]
    restart(runner, 0)
    alone = [runner.step({i: sequence})[i] for i, sequence in enumerate(sequences)]

    rng = np.random.default_rng(seed)
    restart(runner, seed)
    done = [0] * len(sequences)
    while any(done[i] < length for i, length in enumerate(LENGTHS)):
        sizes = {int(i): min(int(rng.integers(0, largest + 1)), LENGTHS[i] - done[i]) for i in rng.permutation(4)}
        chunks = {i: sequences[i][done[i] : done[i] + size] for i, size in sizes.items() if size}
        if not chunks:
            continue
        for i, logits in runner.step(chunks).items():
            expected = alone[i][done[i] : done[i] + sizes[i]]
            assert logits.tobytes() == expected.tobytes(), (i, done[i], sizes)
            done[i] += sizes[i]


def test_same_bits_through_a_wide_matrix(tmp_path: Path) -> None:
    """Wider than one block of outputs and longer than one block of tokens."""
    arithmetic = OrderedArithmetic()
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((70, 301), np.float32), rng.standard_normal((517, 301), np.float32)
    data = arithmetic.lay_out(weight)
    whole = arithmetic.linear(x, data)
    np.testing.assert_allclose(whole, x @ weight.T, atol=1e-4)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        assert arithmetic.linear(x[rows], data).tobytes() == whole[rows].tobytes()
    np.testing.assert_array_equal(arithmetic.rows(data, np.array([3, 516, 3])), weight[[3, 516, 3]])


@given(st.integers(1, 200))
def test_tree_sum_adds_each_row_once(count: int) -> None:
    terms = 2.0 ** (np.arange(count) % 50)[:, None] * np.ones(3)
    assert tree_sum(terms.copy()).tolist() == terms.sum(axis=0).tolist()


@pytest.mark.parametrize("arithmetic", [BlasArithmetic(), OrderedArithmetic()], ids=["blas", "ordered"])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(("num_queries", "offset"), [(1, 0), (1, 30), (9, 4), (600, 3)])
def test_attention_equals_a_plain_one(
    arithmetic: Arithmetic, window: int | None, soft_cap: float | None, num_queries: int, offset: int
) -> None:
    rng = np.random.default_rng(0)
    spec = AttentionSpec(6, 2, 8, 0.3, window, soft_cap)
    q = rng.standard_normal((num_queries, 6, 8), np.float32)
    k, v = rng.standard_normal((2, offset + num_queries, 2, 8), np.float32)
    out = arithmetic.attend(q, k, v, offset, spec).reshape(num_queries, 6, 8)
    for i in {0, num_queries // 2, num_queries - 1}:
        last = offset + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(6):
            scores = k[first : last + 1, head // 3].astype(np.float64) @ q[i, head] * 0.3
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            expected = weights @ v[first : last + 1, head // 3] / weights.sum()
            np.testing.assert_allclose(out[i, head], expected, atol=1e-5)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="'cuda'; allowed: auto"):
        create_backend("cuda")
