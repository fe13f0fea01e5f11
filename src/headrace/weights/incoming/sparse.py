"""Applies a sparse delta: new values at some places of a tensor, for trainers that change few weights per step.

A delta holds values to be stored, not differences to be added: applying it twice is applying it once, and the result
has the trainer's bits. Called by whoever applies a weight update, with what one of the readers returned.
"""

from __future__ import annotations

import numpy as np

from headrace.errors import InvalidRequest

_I32, _I64 = np.dtype(np.int32), np.dtype(np.int64)
INDEX_DTYPES: dict[str, np.dtype[np.signedinteger]] = {"int32": _I32, "i32": _I32, "int64": _I64, "i64": _I64}


def read_indices(data: np.ndarray, dtype: str, *, name: str) -> np.ndarray:
    """Indices [n] that came as bytes (uint8) and a dtype: int32 or int64, also spelled torch.int32 or I32. A view."""
    found = INDEX_DTYPES.get(dtype.removeprefix("torch.").lower())
    if found is None:
        raise InvalidRequest(f"tensor {name[:80]!r}: indices have dtype {dtype[:40]!r}; allowed: int32, int64.")
    if data.size % found.itemsize:
        raise InvalidRequest(
            f"tensor {name[:80]!r}: {data.size} bytes of indices are no multiple of {found.itemsize}, as {dtype} needs."
        )
    return data.view(found)


def apply_sparse(old: np.ndarray, indices: np.ndarray, values: np.ndarray, *, name: str = "") -> np.ndarray:
    """A float32 copy of `old` (any shape) in which the numbers at `indices` (flat, C order) are `values`.

    `old` is not changed. Raises InvalidRequest, naming the tensor `name`, unless indices are int32 or int64, strictly
    increasing and in range, and values are as many float16 or float32 numbers. (bfloat16 comes as
    `CheckpointTensor.dequantize()`.)
    """
    what = f"tensor {name[:80]!r}"
    if indices.dtype not in (np.int32, np.int64):
        raise InvalidRequest(f"{what}: indices have dtype {indices.dtype}; allowed: int32, int64.")
    if values.dtype not in (np.float16, np.float32):
        raise InvalidRequest(f"{what}: values have dtype {values.dtype}; allowed: float16, float32.")
    if indices.ndim != 1 or values.ndim != 1 or indices.size != values.size:
        raise InvalidRequest(
            f"{what}: indices of shape {list(indices.shape)} and values of shape {list(values.shape)}; "
            "needed: one dimension each, of the same length."
        )
    if indices.size:
        falls = np.flatnonzero(indices[1:] <= indices[:-1])
        if falls.size:
            at = int(falls[0])
            raise InvalidRequest(
                f"{what}: index {indices[at + 1]} follows {indices[at]} at position {at + 1}; "
                "indices must strictly increase."
            )
        first, last = int(indices[0]), int(indices[-1])
        if first < 0 or last >= old.size:
            wrong = first if first < 0 else last
            raise InvalidRequest(f"{what}: index {wrong} is out of range; allowed: 0 to {old.size - 1}.")
    new = old.astype(np.float32, order="C", copy=True)
    new.reshape(-1)[indices] = values
    return new
