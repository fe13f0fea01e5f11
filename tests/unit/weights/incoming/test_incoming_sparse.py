"""Sparse deltas: places and new values, or one error that names the tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.weights.incoming import apply_sparse, read_indices

OLD = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
@pytest.mark.parametrize("value_type", [np.float16, np.float32])
def test_applies_to_a_copy(index_type: type, value_type: type) -> None:
    new = apply_sparse(OLD, np.array([1, 5], index_type), np.array([-1, -2], value_type), name="w")
    assert new.tolist() == [[0, -1, 2], [3, 4, -2]]
    assert new.dtype == np.float32
    assert OLD[0, 1] == 1


def test_indices_count_in_c_order_whatever_the_layout() -> None:
    new = apply_sparse(OLD.T, np.array([1]), np.array([9], np.float32), name="w")
    assert new.tolist() == [[0, 9], [1, 4], [2, 5]]


def test_nothing_changes_nothing() -> None:
    new = apply_sparse(OLD, np.array([], np.int32), np.array([], np.float32), name="w")
    assert (new == OLD).all()
    assert not np.shares_memory(new, OLD)


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        (np.array([1, 1]), np.zeros(2, np.float32), "index 1 follows 1 at position 1; indices must strictly increase."),
        (np.array([3, 2]), np.zeros(2, np.float32), "index 2 follows 3 at position 1; indices must strictly increase."),
        (np.array([-1, 2]), np.zeros(2, np.float32), "index -1 is out of range; allowed: 0 to 5."),
        (np.array([0, 6]), np.zeros(2, np.float32), "index 6 is out of range; allowed: 0 to 5."),
        (np.array([0]), np.zeros(2, np.float32), "indices of shape [1] and values of shape [2]; needed: one dimension"),
        (np.array([[0]]), np.zeros((1, 1), np.float32), "indices of shape [1, 1] and values of shape [1, 1]; needed:"),
        (np.array([0], np.uint8), np.zeros(1, np.float32), "indices have dtype uint8; allowed: int32, int64."),
        (np.array([0]), np.zeros(1), "values have dtype float64; allowed: float16, float32."),
    ],
)
def test_errors(indices: np.ndarray, values: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        apply_sparse(OLD, indices, values, name="layer.w")
    assert caught.value.message.startswith(f"tensor 'layer.w': {message}")


@pytest.mark.parametrize("dtype", ["int32", "torch.int64", "I32"])
def test_indices_from_bytes(dtype: str) -> None:
    wide = np.array([1, 7], np.int64 if "64" in dtype else np.int32)
    found = read_indices(np.frombuffer(b"\0" + wide.tobytes(), np.uint8)[1:], dtype, name="w")
    assert found.tolist() == [1, 7]


def test_indices_from_wrong_bytes() -> None:
    with pytest.raises(InvalidRequest, match=r"tensor 'w': indices have dtype 'int8'; allowed: int32, int64\."):
        read_indices(np.zeros(8, np.uint8), "int8", name="w")
    with pytest.raises(InvalidRequest, match=r"tensor 'w': 7 bytes of indices are no multiple of 4, as int32 needs\."):
        read_indices(np.zeros(7, np.uint8), "int32", name="w")


@given(st.dictionaries(st.integers(0, 99), st.floats(width=32, allow_nan=False)))
def test_equals_setting_one_by_one(changes: dict[int, float]) -> None:
    expected = np.zeros(100, np.float32)
    for index, value in changes.items():
        expected[index] = value
    indices = np.array(sorted(changes), np.int64)
    values = np.array([changes[index] for index in indices.tolist()], np.float32)
    once = apply_sparse(np.zeros(100, np.float32), indices, values)
    np.testing.assert_array_equal(once, expected)
    np.testing.assert_array_equal(apply_sparse(once, indices, values), expected)
