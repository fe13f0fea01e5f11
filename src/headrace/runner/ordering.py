"""The one order of values over token ids: falling value, ties by lower id.

Top-k and top-p truncation (`sampler.py`) and top-N log probabilities (`logprobs.py`) both use it, so that "the N most
likely" means the same tokens everywhere, on any machine and for any selection algorithm underneath.
"""

from __future__ import annotations

import numpy as np

_LOW_BITS = np.int64(0xFFFFFFFF)
_MAGNITUDE = np.int32(0x7FFFFFFF)


def falling(values: np.ndarray) -> np.ndarray:
    """Indices that sort 1-D float32 values without NaN in the module's order.

    Sorts (value, index) packed into one integer: no two are equal, so any algorithm gives the same result, and numpy's
    vectorised integer sort is several times faster than its stable argsort.
    """
    bits = (values + np.float32(0.0)).view(np.int32)  # -0.0 becomes 0.0
    rising = bits ^ ((bits >> 31) & _MAGNITUDE)  # as integers in the order of the floats
    keys = (~rising.astype(np.int64) << 32) | np.arange(values.shape[0])
    keys.sort()
    return keys & _LOW_BITS


def top_ids(row: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest values of a 1-D float32 row without NaN, in the order of the module."""
    size = row.shape[0]
    if k >= size:
        return falling(row)
    if k == 1:
        return np.array([row.argmax()])
    kth = np.partition(row, size - k)[size - k]
    above = np.flatnonzero(row > kth)
    # np.partition leaves open which of equal values it takes; we take the lowest ids.
    ties = np.flatnonzero(row == kth)[: k - above.shape[0]]
    return np.concatenate((above[falling(row[above])], ties))


def rank_of(row: np.ndarray, token_id: int) -> int:
    """1-based place of one token in the order of the module."""
    value = row[token_id]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))
