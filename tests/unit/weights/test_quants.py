"""Every stored kind dequantises to the very floats of the gguf library."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headrace.weights.quants import CHUNK_ELEMENTS, dequantize
from headrace.weights.tensor import CheckpointTensor, TensorKind

# Where the half-precision scales of a block lie, to keep them finite.
SCALES = {
    TensorKind.Q4_0: (0,),
    TensorKind.Q4_1: (0, 2),
    TensorKind.Q5_0: (0,),
    TensorKind.Q5_1: (0, 2),
    TensorKind.Q8_0: (0,),
    TensorKind.Q4_K: (0, 2),
    TensorKind.Q5_K: (0, 2),
    TensorKind.Q6_K: (208,),
}


def random_blocks(kind: TensorKind, count: int) -> np.ndarray:
    rng = np.random.default_rng(list(TensorKind).index(kind))
    if kind not in SCALES:
        numbers = rng.standard_normal(count).astype(np.float32)
        half = numbers.view(np.uint32) >> 16
        stored = {TensorKind.F32: numbers, TensorKind.F16: numbers.astype(np.float16)}.get(kind, half.astype(np.uint16))
        return stored.view(np.uint8).reshape(count, kind.block_bytes)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), np.uint8)
    for offset in SCALES[kind]:
        blocks[:, offset : offset + 2] = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", list(TensorKind), ids=lambda kind: kind.label)
def test_equals_the_gguf_library(kind: TensorKind) -> None:
    count = CHUNK_ELEMENTS // kind.block_size + 37  # more than one chunk
    blocks = random_blocks(kind, count)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.label]).reshape(count, -1)
    tensor = CheckpointTensor("t", (count, kind.block_size), kind, blocks.reshape(-1))
    ours = tensor.dequantize()
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, expected)
    ours[:] = 0  # a copy of its own, never the mapped file
    assert blocks.any()


@pytest.mark.parametrize("kind", list(TensorKind), ids=lambda kind: kind.label)
def test_any_bytes_are_numbers(kind: TensorKind) -> None:
    """Corrupt scales give NaN or infinity, not a warning or an error."""
    data = np.random.default_rng(0).integers(0, 256, 512 * kind.block_bytes, np.uint8)
    assert dequantize(data, kind).shape == (512 * kind.block_size,)
