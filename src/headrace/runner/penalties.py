"""Repetition, presence and frequency penalties of one sequence, as counts of the tokens that it has.

`edits.py` owns one per sequence that asks for a penalty. Counts are kept sparsely, one entry per distinct token: a
step costs what the text is wide, not what the vocabulary is. They are built from the tokens a sequence brings (a
preempted one brings its output along) and then kept up to date token by token; both ways give the same bits.

Repetition counts prompt and output, as in CTRL (arXiv 1909.05858), transformers and vLLM; presence and frequency count
the output alone, as OpenAI's API defines them.
"""

from __future__ import annotations

import numpy as np

from headrace.types import SamplingParams

_PENALTY_LIMIT = 1e30  # any larger one means the same, and float32 holds it
_LARGEST = np.float32(1e37)  # keeps a logit finite when a small repetition penalty divides a huge one


class PenaltyCounts:
    """Distinct tokens of a sequence with their number of uses in the output."""

    def __init__(self, params: SamplingParams, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        self._repetition = np.float32(np.clip(params.repetition_penalty, 1 / _PENALTY_LIMIT, _PENALTY_LIMIT))
        self._presence = np.float32(np.clip(params.presence_penalty, -_PENALTY_LIMIT, _PENALTY_LIMIT))
        self._frequency = np.float32(np.clip(params.frequency_penalty, -_PENALTY_LIMIT, _PENALTY_LIMIT))
        output_ids, output_counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        # Only repetition looks at the prompt.
        ids = np.unique(token_ids) if params.repetition_penalty != 1.0 else output_ids
        self._size = ids.shape[0]
        capacity = max(64, 2 * self._size)
        self._ids = np.zeros(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)
        self._ids[: self._size] = ids
        self._counts[np.searchsorted(ids, output_ids)] = output_counts
        self._index = {token_id: i for i, token_id in enumerate(ids.tolist())}

    def append(self, token_id: int) -> None:
        """Counts one output token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if index == self._ids.shape[0]:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1

    def apply(self, row: np.ndarray) -> None:
        """Changes a row of logits in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = row[ids]
        if self._repetition != 1.0:
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency != 0.0:
            values -= self._frequency * counts
        if self._presence != 0.0:
            values -= self._presence * (counts > 0)
        row[ids] = np.minimum(values, _LARGEST)
