"""Fast float32 arithmetic: BLAS for every product. Summation order varies with the shapes, so results may differ in
the last bits between batches.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.ops import AttentionSpec
from headrace.kernels.reference.arithmetic import Floats, Function, first_visible

# Queries of a long chunk are handled in blocks: bounds the score matrix, and skips keys that no query of a block sees.
QUERY_BLOCK = 256


class BlasArithmetic:
    """Implements `Arithmetic`."""

    def lay_out(self, weight_OI: Floats) -> Floats:
        return weight_OI

    def rows(self, data: Floats, ids_T: np.ndarray) -> Floats:
        rows: Floats = data[ids_T]
        return rows

    def linear(self, x_TI: Floats, data: Floats) -> Floats:
        return x_TI @ data.T

    def sum_squares(self, x: Floats) -> Floats:
        sums: Floats = np.einsum("...i,...i->...", x, x)
        return sums[..., None]

    def apply(self, function: Function, x_TI: Floats) -> Floats:
        return function(x_TI)

    def attend(self, q_THK: Floats, k_NGK: Floats, v_NGK: Floats, offset: int, spec: AttentionSpec) -> Floats:
        num_queries = q_THK.shape[0]
        out = np.empty((num_queries, spec.num_heads * spec.head_dim), np.float32)
        for start in range(0, num_queries, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, num_queries)
            first = first_visible(offset + start, spec.sliding_window)
            keys = slice(first, offset + end)
            out[start:end] = _attend_block(q_THK[start:end], k_NGK[keys], v_NGK[keys], offset + start - first, spec)
        return out


def _attend_block(q_THK: Floats, k_NGK: Floats, v_NGK: Floats, offset: int, spec: AttentionSpec) -> Floats:
    """All heads at once: the query heads that share a KV head are rows of one product with it."""
    num_queries, num_groups = q_THK.shape[0], spec.num_kv_heads
    q = (q_THK * np.float32(spec.scale)).reshape(num_queries, num_groups, -1, spec.head_dim)
    q_GRK = q.transpose(1, 2, 0, 3).reshape(num_groups, -1, spec.head_dim)  # R: heads of the group x queries
    scores_GRN = q_GRK @ k_NGK.transpose(1, 2, 0)
    if spec.soft_cap is not None:
        cap = np.float32(spec.soft_cap)
        scores_GRN /= cap
        np.tanh(scores_GRN, out=scores_GRN)
        scores_GRN *= cap
    if num_queries > 1:
        scores = scores_GRN.reshape(num_groups, -1, num_queries, scores_GRN.shape[-1])
        scores += _mask(num_queries, scores_GRN.shape[-1], offset, spec.sliding_window)
    scores_GRN -= scores_GRN.max(axis=-1, keepdims=True)
    np.exp(scores_GRN, out=scores_GRN)
    out_GRK = np.matmul(scores_GRN, v_NGK.transpose(1, 0, 2), dtype=np.float32)
    out_GRK /= scores_GRN.sum(axis=-1, keepdims=True)
    by_query: Floats = out_GRK.reshape(num_groups, -1, num_queries, spec.head_dim).transpose(2, 0, 1, 3)
    return by_query.reshape(num_queries, -1)


def _mask(num_queries: int, num_keys: int, offset: int, window: int | None) -> Floats:
    """[T, N]: 0 where the query sees the key, minus infinity elsewhere."""
    query = np.arange(num_queries)[:, None] + offset
    key = np.arange(num_keys)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))
