"""Turns hidden states of a prompt into its embedding: the last token's, or the mean of all tokens'.

`batch.py` keeps one pooler per slot that wants one, `model_runner.py` feeds it. A mean is summed in float64, token by
token, so that chunks give the same bits as the whole; a sequence that comes back begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Consecutive rows of a pass's hidden states that one slot pools. `is_last`: its prompt ends with them."""

    slot: int
    first_row: int
    num_rows: int
    is_last: bool


class Pooler:
    """One sequence."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        self._takes_all = kind == "mean"
        self._num_tokens = num_tokens
        self._sum_D: np.ndarray | None = None

    @property
    def takes_all(self) -> bool:
        return self._takes_all

    def num_wanted(self, start: int, end: int) -> int:
        """How many of the tokens [start, end) count, the last ones of them."""
        if self._takes_all:
            return end - start
        return int(end == self._num_tokens)

    def add(self, hidden_UD: np.ndarray) -> None:
        """The next ones that count, in order."""
        if self._sum_D is None:
            self._sum_D = np.zeros(hidden_UD.shape[1], np.float64)
        for row_D in hidden_UD:  # numpy's own sum has no order that it promises
            self._sum_D += row_D

    def vector(self) -> np.ndarray:
        """Of the whole prompt: float32 [D]; not finite if one of the states was not."""
        assert self._sum_D is not None, "something has been added"
        return (self._sum_D / (self._num_tokens if self._takes_all else 1)).astype(np.float32)
