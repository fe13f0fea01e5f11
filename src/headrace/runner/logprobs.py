"""Log probabilities of chosen tokens and of prompt tokens, from raw logits.

`model_runner.py` calls it with rows before any bias, penalty or temperature. Every row is reduced alone, along its own
contiguous axis, so a row's numbers do not depend on the rows beside it. Rows are worked on a few at a time: the memory
beyond the result is bounded whatever the number of prompt tokens.
"""

from __future__ import annotations

import numpy as np

from headrace.runner.ordering import rank_of, top_ids
from headrace.types import ALL_LOGPROBS, LogprobRows

_ROW_BLOCK_ELEMENTS = 1 << 18


def rows_per_block(vocab_size: int) -> int:
    """How many rows are worked on at once: about a megabyte of float32."""
    return max(1, _ROW_BLOCK_ELEMENTS // vocab_size)


def log_normalisers(logits: np.ndarray) -> np.ndarray:
    """float64 log(sum(exp(row))) of each row of float32 [R, V] finite logits."""
    num_rows, vocab_size = logits.shape
    result = np.empty(num_rows, np.float64)
    step = rows_per_block(vocab_size)
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, num_rows, step):
            block = logits[start : start + step]
            highest = block.max(axis=1, keepdims=True)
            shifted = block - highest
            np.exp(shifted, out=shifted)
            result[start : start + step] = np.log(shifted.sum(axis=1).astype(np.float64)) + highest[:, 0]
    return result


def score(logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> LogprobRows:
    """Rows for `token_ids[i]` under `logits[i]`, with the `num_top` most likely tokens (-1: all of them) after it."""
    num_rows, vocab_size = logits.shape
    if num_top == ALL_LOGPROBS or num_top > vocab_size:
        num_top = vocab_size
    ids = np.empty((num_rows, 1 + num_top), np.int32)
    values = np.empty((num_rows, 1 + num_top), np.float32)
    ranks = np.empty(num_rows, np.int32)
    normalisers = log_normalisers(logits)
    ids[:, 0] = token_ids
    for i in range(num_rows):
        row = logits[i]
        if num_top:
            ids[i, 1:] = top_ids(row, num_top)
        # A finite logit may lie so far below the best one that its difference leaves float32: the lowest value stands.
        wanted = np.maximum(row[ids[i]].astype(np.float64) - normalisers[i], np.finfo(np.float32).min)
        values[i] = wanted
        ranks[i] = rank_of(row, int(token_ids[i]))
    return LogprobRows.from_arrays(ids, values, ranks)
