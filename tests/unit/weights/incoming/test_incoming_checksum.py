"""Checksums: equal for equal weights in any order, different for anything else."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from headrace.weights.incoming import tensor_checksum, total_checksum
from headrace.weights.tensor import CheckpointTensor, TensorKind

TENSOR = CheckpointTensor("w", (2, 3), TensorKind.F16, np.arange(12, dtype=np.uint8))


def test_what_a_trainer_has_to_compute() -> None:
    expected = hashlib.blake2b(b"F16 2,3\0" + bytes(range(12)), digest_size=16).hexdigest()
    assert tensor_checksum(TENSOR) == expected
    total = hashlib.blake2b(b"\1\0\0\0w" + expected.encode(), digest_size=16).hexdigest()
    assert total_checksum({"w": TENSOR}) == total


def test_kind_shape_and_bytes_count() -> None:
    others = [
        replace(TENSOR, kind=TensorKind.BF16),
        replace(TENSOR, shape=(3, 2)),
        replace(TENSOR, shape=(6,)),
        replace(TENSOR, data=TENSOR.data[::-1].copy()),
    ]
    assert len({tensor_checksum(tensor) for tensor in [TENSOR, *others]}) == 5
    assert tensor_checksum(replace(TENSOR, name="other")) == tensor_checksum(TENSOR)


def test_the_total_knows_names_and_no_order() -> None:
    other = replace(TENSOR, shape=(12, 1))
    assert total_checksum({"a": TENSOR, "b": other}) == total_checksum({"b": other, "a": TENSOR})
    assert total_checksum({"a": TENSOR, "b": other}) != total_checksum({"b": TENSOR, "a": other})
    assert total_checksum({}) != total_checksum({"a": TENSOR})
