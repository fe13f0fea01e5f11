"""Arithmetic in which every result has one order of operations: the same request gives the same bits in any batch.

Why that holds. A result depends on the batch only if (a) the order in which its terms are added does, or (b) an
elementwise function does. (a) No BLAS and no numpy reduction is used: each sum is `tree_sum`, elementwise additions
that halve an axis. Which terms meet in which addition follows from the axis' length alone: the input width for linear
and norms, and for attention the number of keys that the query's own position sees (each query is summed alone, over
exactly those). Products and sums are single IEEE operations, correctly rounded, so vector width, blocking and
neighbours cannot change them; separate numpy calls are never fused into multiply-adds. (b) exp and tanh are not
correctly rounded, and numpy may use another instruction path for another memory layout: so each call sees one token's
contiguous row, whose length and layout do not depend on the batch. The largest of the scores is exact in any order.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.ops import AttentionSpec
from headrace.kernels.reference.arithmetic import Floats, Function, first_visible

BLOCK_ELEMENTS = 1 << 17  # products held at once: half a megabyte, so that they stay in the cache
TOKEN_BLOCK = 16


def tree_sum(terms: Floats) -> Floats:
    """The sum over axis 0, destroying `terms`: the upper half is added to the lower one until one row is left.

    An odd row in the middle waits for the next round. The order depends on the axis' length only.
    """
    count = terms.shape[0]
    while count > 1:
        half = count // 2
        np.add(terms[:half], terms[count - half : count], out=terms[:half])
        count -= half
    total: Floats = terms[0]
    return total


class OrderedArithmetic:
    """Implements `Arithmetic`. Weights lie input-major, so that halving the input axis adds contiguous rows."""

    def lay_out(self, weight_OI: Floats) -> Floats:
        return np.ascontiguousarray(weight_OI.T)

    def rows(self, data: Floats, ids_T: np.ndarray) -> Floats:
        return np.ascontiguousarray(data[:, ids_T].T)

    def linear(self, x_TI: Floats, data: Floats) -> Floats:
        num_tokens, (num_inputs, num_outputs) = x_TI.shape[0], data.shape
        out = np.empty((num_tokens, num_outputs), np.float32)
        x_IT = np.ascontiguousarray(x_TI.T)
        token_block = min(max(num_tokens, 1), TOKEN_BLOCK)
        output_block = max(16, BLOCK_ELEMENTS // (num_inputs * token_block))
        for t in range(0, num_tokens, token_block):
            tokens = slice(t, t + token_block)
            for o in range(0, num_outputs, output_block):
                outputs = slice(o, o + output_block)
                out[tokens, outputs] = tree_sum(x_IT[:, tokens, None] * data[:, None, outputs])
        return out

    def sum_squares(self, x: Floats) -> Floats:
        return tree_sum(np.ascontiguousarray(np.moveaxis(np.square(x), -1, 0)))[..., None]

    def apply(self, function: Function, x_TI: Floats) -> Floats:
        out = np.empty(x_TI.shape, np.float32)
        for t in range(x_TI.shape[0]):
            out[t] = function(np.ascontiguousarray(x_TI[t]))
        return out

    def attend(self, q_THK: Floats, k_NGK: Floats, v_NGK: Floats, offset: int, spec: AttentionSpec) -> Floats:
        num_queries, num_groups, head_dim = q_THK.shape[0], spec.num_kv_heads, spec.head_dim
        q_TKGR = (q_THK * np.float32(spec.scale)).reshape(num_queries, num_groups, -1, head_dim).transpose(0, 3, 1, 2)
        k_KNG = np.ascontiguousarray(k_NGK.transpose(2, 0, 1))
        out = np.empty((num_queries, spec.num_heads * head_dim), np.float32)
        for t in range(num_queries):
            last = offset + t
            keys = slice(first_visible(last, spec.sliding_window), last + 1)
            scores_NGR = tree_sum(q_TKGR[t][:, None] * k_KNG[:, keys, :, None])
            out[t] = _weigh(scores_NGR, v_NGK[keys], spec).reshape(-1)
        return out


def _weigh(scores_NGR: Floats, v_NGK: Floats, spec: AttentionSpec) -> Floats:
    """Softmax over N and the weighted sum of values: [G, R, K]."""
    if spec.soft_cap is not None:
        cap = np.float32(spec.soft_cap)
        scores_NGR = np.tanh(np.ascontiguousarray(scores_NGR / cap)) * cap
    weights_NGR = np.exp(np.ascontiguousarray(scores_NGR - scores_NGR.max(axis=0)))
    summed = tree_sum(weights_NGR[..., None] * v_NGK[:, :, None, :])
    return summed / tree_sum(weights_NGR)[..., None]
