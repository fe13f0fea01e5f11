"""Ends the thoughts of one output when their budget is used: then only the closing marker can come, id by id.

`constraints.py` holds a follower per slot that has a budget, beside the grammar matchers. Its state is a function of
the budget and the output, so a sequence that left and came back goes on where it was. It knows ids, no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np

from headrace.types import ThinkingBudget

MAX_LEAD_TOKENS = 2
"""White space that may stand before the opening marker; what opens later is no thought, but the answer's own text."""


class _State(Enum):
    BEFORE = 0
    THINKING = 1
    ANSWER = 2


class ThinkingFollower:
    """One sequence."""

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._budget = budget
        self._state = _State.THINKING if budget.is_open else _State.BEFORE
        self._num_matched = 0  # ids of the marker that may come next, which the output ends with
        self._num_tokens = 0  # in this state
        for token_id in output:
            self.accept(token_id)

    @property
    def forced_id(self) -> int | None:
        """The only token that may come next; None where any may."""
        if self._state is not _State.THINKING or self._num_tokens < self._budget.max_tokens:
            return None
        return self._budget.close_ids[self._num_matched]

    def accept(self, token_id: int) -> None:
        """The output has got this token."""
        if self._state is _State.ANSWER:
            return
        is_thinking = self._state is _State.THINKING
        marker = self._budget.close_ids if is_thinking else self._budget.open_ids
        self._num_tokens += 1
        self._num_matched = _matched(marker, self._num_matched, token_id)
        if self._num_matched == len(marker):
            self._move(_State.ANSWER if is_thinking else _State.THINKING)
        elif not is_thinking and self._num_tokens - self._num_matched > MAX_LEAD_TOKENS:
            self._move(_State.ANSWER)

    def _move(self, state: _State) -> None:
        self._state, self._num_matched, self._num_tokens = state, 0, 0


def only(token_id: int, vocab_size: int) -> np.ndarray:
    """A mask, float32 [V], that leaves this token alone."""
    mask = np.full(vocab_size, -np.inf, np.float32)
    mask[token_id] = 0.0
    return mask


def _matched(marker: tuple[int, ...], num_matched: int, token_id: int) -> int:
    """How many of the marker's first ids the output ends with, which ended with `num_matched` of them before."""
    tail = (*marker[:num_matched], token_id)
    while tail and tail != marker[: len(tail)]:
        tail = tail[1:]
    return len(tail)
