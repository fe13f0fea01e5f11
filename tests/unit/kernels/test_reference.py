"""Pieces of the numpy backend: activations, rotary tables, paged memory, merged weights, bad numbers."""

from __future__ import annotations

import math

import numpy as np
import psutil
import pytest

from headrace.kernels import create_backend
from headrace.kernels.ops import KVSpec, RopeSpec
from headrace.kernels.reference import ReferenceBackend
from headrace.kernels.reference.functions import ACTIVATIONS
from headrace.kernels.reference.memory import ROPE_BLOCK, PagedKV, RopeTables

PLAIN = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


class Stored:
    """A tensor to pack."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers.astype(np.float32)
        self.shape = numbers.shape

    def dequantize(self) -> np.ndarray:
        return self.numbers.copy()


@pytest.mark.parametrize("name", list(PLAIN))
def test_activations(name: str) -> None:
    x = np.linspace(-12, 12, 997, dtype=np.float32)
    expected = np.array([PLAIN[name](float(value)) for value in x])
    np.testing.assert_allclose(ACTIVATIONS[name](x), expected, rtol=3e-5 if name != "gelu_tanh" else 1e-2, atol=1e-6)
    assert ACTIVATIONS[name](x).dtype == np.float32
    with np.errstate(all="ignore"):
        assert np.isfinite(ACTIVATIONS[name](np.float32([-1000, 1000]))).all()


def test_rope_rows_do_not_depend_on_who_asks() -> None:
    spec = RopeSpec(np.float32([1.0, 0.01]), False, attention_scale=1.5)
    positions = np.array([0, 7, ROPE_BLOCK + 3], np.int32)
    grown, direct = RopeTables(), RopeTables()
    first = grown.rows(spec, positions[:2])
    cos, sin = grown.rows(spec, positions)
    for one, other in zip((cos, sin), direct.rows(spec, positions), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first[0], cos[:2])
    angles = positions[:, None] * spec.inv_freq
    np.testing.assert_allclose(cos[:, 0], 1.5 * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[:, 0], 1.5 * np.sin(angles), atol=1e-5)


@pytest.mark.parametrize("table", [[3, 4, 5], [3, 5, 4], [7, 0, 2]])
def test_places_of_a_sequence(table: list[int]) -> None:
    kv = PagedKV(KVSpec(1, 1, 1), num_blocks=8, block_size=4)
    slots = np.array([block * 4 + i for block in table for i in range(4)])
    everything = np.arange(32)
    for start in range(11):
        for end in range(start + 1, 12):
            places = kv.places(np.array([*table, 0, 0], np.int32), start, end)
            np.testing.assert_array_equal(everything[places], slots[start:end])
    assert isinstance(kv.places(np.array([3, 4, 5]), 0, 12), slice)  # neighbours are read without a copy


@pytest.mark.parametrize("name", ["reference", "reference-exact"])
def test_merged_weights_and_biases(name: str) -> None:
    backend = create_backend(name)
    assert isinstance(backend, ReferenceBackend)
    rng = np.random.default_rng(0)
    parts = [Stored(rng.standard_normal((rows, 6))) for rows in (3, 5)]
    biases = [Stored(rng.standard_normal(rows)) for rows in (3, 5)]
    packed = backend.packer().pack_linear(parts, biases)
    assert packed.bias_O is not None
    np.testing.assert_array_equal(packed.bias_O, np.concatenate([bias.numbers for bias in biases]))
    stacked = np.concatenate([part.numbers for part in parts])
    assert sorted(packed.data.reshape(-1).tolist()) == sorted(stacked.reshape(-1).tolist())
    assert backend.packer().pack_linear(parts).bias_O is None


def test_kv_memory_is_not_touched_before_use() -> None:
    backend = create_backend("reference")
    before = psutil.Process().memory_info().rss
    backend.allocate_kv(KVSpec(num_layers=8, num_kv_heads=8, head_dim=128), num_blocks=1 << 11, block_size=16)  # 2 GiB
    assert psutil.Process().memory_info().rss - before < 1 << 28
