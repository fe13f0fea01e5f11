"""Attention of the compiled kernels over paged memory, against dense float64, on each instruction set.

K and V are rounded in numpy as the memory stores them (fp16, or int8 with a scale per position and head), so that what
is left is float32 arithmetic: about 1e-6 of the values' size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from headrace.kernels import Backend
from headrace.kernels.ops import AttentionSpec, KVSpec
from headrace.testing.op_models import OpModel, float_tensor
from headrace.testing.steps import Runner

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

pytestmark = pytest.mark.usefixtures("instruction_set")
NUM_TOKENS = 1400  # the vocabulary: each token id stands for one (q, k, v)


@dataclass(frozen=True)
class Case:
    """Two layers' attention added up, one of them with the window."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    has_int8_kv: bool = False
    block_size: int = 16
    num_threads: int = 1

    @property
    def specs(self) -> tuple[AttentionSpec, AttentionSpec]:
        shape = (self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)
        return AttentionSpec(*shape, None, self.soft_cap), AttentionSpec(*shape, self.window, self.soft_cap)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def table(self, rng: np.random.Generator) -> np.ndarray:
        """q, k, v of every token id; scores spread over several units, so that weights differ."""
        return (rng.standard_normal((NUM_TOKENS, sum(self.sizes))) * 1.5).astype(np.float32)

    def runner(self, table: np.ndarray, num_blocks: int = 300) -> Runner:
        backend = NativeBackend(self.num_threads, has_int8_kv=self.has_int8_kv)
        model: Any = OpModel(self._build(backend, table), KVSpec(2, self.kv_heads, self.head_dim))
        return Runner(model, backend, num_blocks=num_blocks, block_size=self.block_size)

    def _build(self, backend: Backend, table: np.ndarray) -> Any:
        packed = backend.packer().pack_table(float_tensor(table))

        def forward(ops: Any) -> Any:
            q, k, v = ops.split(ops.embed(packed), self.sizes)
            q, k, v = ops.heads(q, self.heads), ops.heads(k, self.kv_heads), ops.heads(v, self.kv_heads)
            first, second = (ops.attention(q, k, v, layer, spec) for layer, spec in enumerate(self.specs))
            return ops.scale(ops.logit_rows(ops.add(first, ops.scale(second, 0.5))), 1.0)

        return forward

    def stored(self, x_NGK: np.ndarray) -> np.ndarray:
        if not self.has_int8_kv:
            return x_NGK.astype(np.float16).astype(np.float64)
        scale = np.abs(x_NGK).max(axis=2, keepdims=True) / np.float32(127)
        return np.rint(x_NGK * (np.float32(1) / scale)) * scale.astype(np.float64)

    def exact(self, rows: np.ndarray) -> np.ndarray:
        """All queries of one sequence: [N, H * K] in float64."""
        q, k, v = np.split(rows, np.cumsum(self.sizes)[:-1], axis=1)
        num_rows, per_group = len(rows), self.heads // self.kv_heads
        q_HNK = q.reshape(num_rows, self.heads, -1).astype(np.float64).transpose(1, 0, 2)
        k_HNK, v_HNK = (
            np.repeat(self.stored(x.reshape(num_rows, self.kv_heads, -1)).transpose(1, 0, 2), per_group, axis=0)
            for x in (k, v)
        )
        scores = q_HNK @ k_HNK.transpose(0, 2, 1) * self.head_dim**-0.5
        if self.soft_cap is not None:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        distance = np.arange(num_rows)[:, None] - np.arange(num_rows)
        out = np.zeros((self.heads, num_rows, self.head_dim))
        for spec, factor in zip(self.specs, (1.0, 0.5), strict=True):
            is_hidden = (distance < 0) | (distance >= (spec.sliding_window or num_rows))
            visible = np.where(is_hidden, -np.inf, scores)
            weights = np.exp(visible - visible.max(axis=2, keepdims=True))
            out += factor * (weights / weights.sum(axis=2, keepdims=True) @ v_HNK)
        return out.transpose(1, 0, 2).reshape(num_rows, -1)


@dataclass(frozen=True)
class Texts:
    """Sequences of token ids, and what dense attention makes of each."""

    table: np.ndarray
    ids: dict[int, np.ndarray]
    exact: dict[int, np.ndarray]


@cache
def texts(case: Case, lengths: tuple[int, ...]) -> Texts:
    """The same for every instruction set, so computed once."""
    rng = np.random.default_rng(3)
    table = case.table(rng)
    ids = {name: rng.integers(0, NUM_TOKENS, length) for name, length in enumerate(lengths)}
    return Texts(table, ids, {name: case.exact(table[i]) for name, i in ids.items()})


def compare(case: Case, texts: Texts, steps: list[dict[int, int]]) -> None:
    """Runs the sequences in steps of {sequence: number of tokens}; every row must be what dense attention gives."""
    runner = case.runner(texts.table)
    done = dict.fromkeys(texts.ids, 0)
    for step in steps:
        chunks = {name: texts.ids[name][done[name] : done[name] + count] for name, count in step.items()}
        for name, rows in runner.step(chunks).items():
            expected = texts.exact[name][done[name] : done[name] + len(rows)]
            np.testing.assert_allclose(rows, expected, rtol=0, atol=2e-5, err_msg=f"sequence {name} from {done[name]}")
            done[name] += len(rows)


SHAPES = [
    Case(1, 1, 8),
    Case(2, 1, 16, window=1),
    Case(6, 2, 24, window=7, block_size=32),
    Case(9, 3, 64, soft_cap=5.0),
    Case(4, 1, 80, window=20, num_threads=2),
    Case(5, 1, 128, has_int8_kv=True),
    Case(8, 1, 256, window=33, has_int8_kv=True, block_size=32),
    Case(16, 2, 16, soft_cap=2.0, window=40, has_int8_kv=True, num_threads=3),
    Case(7, 1, 24, has_int8_kv=True),
    Case(3, 3, 40, window=16),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case) -> None:
    """Prefill and decode of several sequences in one batch, in shuffled blocks."""
    steps = [{0: 33}, {0: 1, 1: 16, 2: 1}, {0: 16, 1: 1, 2: 1}, {3: 15, 2: 1, 0: 1}, {0: 19, 1: 18}, {3: 2}]
    compare(case, texts(case, (70, 35, 3, 17)), steps)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 16),
        Case(4, 2, 16, window=256, block_size=32),
        Case(3, 1, 24, window=300, has_int8_kv=True, num_threads=2),
        Case(2, 2, 16, window=100, soft_cap=4.0),
    ],
    ids=str,
)
def test_contexts_longer_than_a_span(case: Case) -> None:
    """Contexts end on, before and behind the borders of 256 positions; windows start anywhere between them."""
    steps = [{0: 255, 2: 511}, {0: 1, 1: 256, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 520, 2: 2, 3: 19}, {3: 1, 0: 323}]
    compare(case, texts(case, (1100, 257, 514, 20)), steps)


@pytest.mark.parametrize("has_int8_kv", [False, True])
def test_one_position_far_above_the_others(rng: np.random.Generator, has_int8_kv: bool) -> None:
    """Scores near a thousand, in the first and the second span: exponentials neither overflow nor lose a span."""
    case = Case(2, 1, 16, has_int8_kv=has_int8_kv)
    table = case.table(rng)
    ids = rng.permutation(NUM_TOKENS)[:600]
    table[ids[[10, 300]], 32:48] *= [[30], [100]]  # the keys
    rows = case.runner(table).step({0: ids})[0]
    np.testing.assert_allclose(rows, case.exact(table[ids]), rtol=0, atol=2e-3)  # a thousand has an error of 1e-4


@pytest.mark.parametrize("has_int8_kv", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
def test_what_lies_in_memory_that_is_not_the_sequence_s_does_not_matter(
    rng: np.random.Generator, has_int8_kv: bool, block_size: int
) -> None:
    """Blocks full of NaN are given away again: only positions that the new owners wrote are read."""
    case = Case(4, 2, 24, window=21, has_int8_kv=has_int8_kv, block_size=block_size)
    table = case.table(rng)
    table[0] = np.nan
    sequences = {name: rng.integers(1, NUM_TOKENS, length) for name, length in enumerate((1, 15, 50, 17, 100))}
    clean, dirty = case.runner(table, 40), case.runner(table, 40)
    broken = dirty.step({9: np.zeros(40 * block_size - 3, np.int64)})[9]
    assert np.isnan(broken).all()
    dirty.release(9)
    dirty.free = list(clean.free)
    for steps in ({n: ids[: len(ids) // 2 + 1] for n, ids in sequences.items()}, {4: sequences[4][51:]}):
        expected, found = clean.step(steps), dirty.step(steps)
        for name, rows in expected.items():
            assert np.isfinite(rows).all()
            assert rows.tobytes() == found[name].tobytes(), name


@pytest.mark.parametrize("has_int8_kv", [False, True])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_number_that_is_not_finite_shows(rng: np.random.Generator, has_int8_kv: bool, part: str, bad: float) -> None:
    """From the bad token on (q: only there), its heads are not finite; before it, and in other sequences, bits stay."""
    case = Case(2, 2, 24, has_int8_kv=has_int8_kv)
    table = case.table(rng)
    ids = {0: np.arange(300), 1: np.arange(400, 440)}
    good = case.runner(table).step(ids)
    column = 24 + 17 + {"q": 0, "k": 48, "v": 96}[part]  # of the second head
    table[270, column] = bad
    found = case.runner(table).step(ids)
    assert found[1].tobytes() == good[1].tobytes()
    assert found[0][:270].tobytes() == good[0][:270].tobytes()
    assert found[0][:, :24].tobytes() == good[0][:, :24].tobytes(), "the first head"
    of_head = found[0][270:, 24:]
    if part == "v" and not has_int8_kv:
        assert not np.isfinite(of_head[:, 17]).any()
    elif part == "k" and not has_int8_kv and np.isinf(bad):
        assert np.isnan(of_head).any(), "minus infinity hides a position, plus infinity takes all: NaN"
    else:
        assert not np.isfinite(of_head[: 1 if part == "q" else None]).any()
    if part == "q":
        assert found[0][271:].tobytes() == good[0][271:].tobytes()
