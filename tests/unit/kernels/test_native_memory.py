"""Attention's own memory: bounded whatever the step, and no bit depends on how it is kept so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.kernels.ops import AttentionSpec, KVSpec
from headrace.testing.op_models import OpModel, float_tensor
from headrace.testing.steps import Runner

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

HEADS, KV_HEADS, HEAD_DIM, NUM_TOKENS = 64, 2, 16, 1100
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BYTES_PER_SPAN = HEADS * (2 + HEAD_DIM) * 4
SPAN = 256  # kAttentionSpan
BOUND = 8 << 20  # kMostPartBytes


def runner(num_threads: int, window: int | None) -> Runner:
    backend = NativeBackend(num_threads)
    table = np.random.default_rng(1).standard_normal((NUM_TOKENS, WIDTH)).astype(np.float32)
    packed = backend.packer().pack_table(float_tensor(table))

    def forward(ops: Any) -> Any:
        q, k, v = ops.split(ops.embed(packed), (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))
        q, k, v = ops.heads(q, HEADS), ops.heads(k, KV_HEADS), ops.heads(v, KV_HEADS)
        shape = (HEADS, KV_HEADS, HEAD_DIM, 0.25)
        far, near = (ops.attention(q, k, v, i, AttentionSpec(*shape, size)) for i, size in enumerate((None, window)))
        return ops.scale(ops.logit_rows(ops.add(far, near)), 1.0)

    model: Any = OpModel(forward, KVSpec(2, KV_HEADS, HEAD_DIM))
    return Runner(model, backend, num_blocks=150, block_size=16)


def attention_bytes(runner: Runner) -> int:
    assert isinstance(runner.backend, NativeBackend)
    assert runner.backend._program is not None
    return runner.backend._program.program.attention_bytes


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_long_chunk(num_threads: int, window: int | None) -> None:
    """All parts at once would take more than the bound; in short chunks, that keep them, every bit is the same."""
    num_spans = sum(-(-n // SPAN) for n in range(1, NUM_TOKENS + 1))
    assert num_spans * BYTES_PER_SPAN > 1.2 * BOUND
    ids = np.random.default_rng(0).permutation(NUM_TOKENS).tolist()
    whole, pieces = runner(num_threads, window), runner(1, window)
    rows = whole.step({0: ids})[0]
    assert attention_bytes(whole) <= num_threads * 5 * BYTES_PER_SPAN
    parts = [pieces.step({0: ids[at : at + 100]})[0] for at in range(0, NUM_TOKENS, 100)]
    assert rows.tobytes() == np.concatenate(parts).tobytes()
    assert 0 < attention_bytes(pieces) <= BOUND
    # A short step after a long one, and the other way round.
    again = whole.step({0: [5]})[0], pieces.step({0: [5]})[0]
    assert again[0].tobytes() == again[1].tobytes()
    assert whole.step({1: ids})[1].tobytes() == rows.tobytes()
    assert attention_bytes(whole) <= BOUND
