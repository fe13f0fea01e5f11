"""What one sequence does to its row of logits before a token is chosen: bias, bans and penalties.

`batch.py` builds one per sequence that needs any of them; `sampler.py` applies it to a copy of the row. In vLLM's
order: logit bias, bad words, min tokens, then penalties. A banned token's logit is -inf and no bias brings it back.
Ids outside the vocabulary have no logit and are left out here; telling the user so is the validator's work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from headrace.runner.penalties import PenaltyCounts
from headrace.types import SamplingParams

_BIAS_LIMIT = 1e30  # any larger bias means the same, and a float32 logit stays finite
_BANNED = np.float32(-np.inf)


def _ids_array(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    return np.array(sorted({i for i in token_ids if 0 <= i < vocab_size}), np.int64)


class LogitEdits:
    """The edits of one sequence; `append` follows its output."""

    def __init__(
        self,
        params: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        bias = {i: b for i, b in (params.logit_bias or {}).items() if 0 <= i < vocab_size}
        self._bias_ids = np.array(list(bias), np.int64)
        self._biases = np.clip(np.array(list(bias.values()), np.float64), -_BIAS_LIMIT, _BIAS_LIMIT).astype(np.float32)
        words = [word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
        self._banned_ids = _ids_array((word[-1] for word in words if len(word) == 1), vocab_size)
        self._phrases = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self._longest_prefix = max((len(prefix) for prefix, _ in self._phrases), default=0)
        # Also with ignore_eos: min_tokens promises that much text, and an EOS is not text.
        self._ending_ids = _ids_array((*eos_token_ids, *params.stop_token_ids), vocab_size)
        self._end_allowed_from = num_prompt_tokens + params.min_tokens
        has_penalty = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._penalties = PenaltyCounts(params, token_ids, num_prompt_tokens) if has_penalty else None

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters change logits at all."""
        return bool(
            params.logit_bias
            or params.bad_words_token_ids
            or params.min_tokens > 0
            or params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def append(self, token_id: int) -> None:
        """The sequence got one more output token."""
        if self._penalties is not None:
            self._penalties.append(token_id)

    def apply(self, row: np.ndarray, token_ids: np.ndarray, *, bans_end: bool = True) -> None:
        """Edits a row in place; `token_ids` are all tokens so far, prompt and output. Without `bans_end` the end may
        come before min_tokens."""
        if self._bias_ids.shape[0]:
            row[self._bias_ids] += self._biases
        if self._banned_ids.shape[0]:
            row[self._banned_ids] = _BANNED
        if self._phrases:
            self._ban_phrase_ends(row, token_ids)
        if bans_end and token_ids.shape[0] < self._end_allowed_from:
            row[self._ending_ids] = _BANNED
        if self._penalties is not None:
            self._penalties.apply(row)

    def _ban_phrase_ends(self, row: np.ndarray, token_ids: np.ndarray) -> None:
        """Bans the last token of each phrase whose others were just said, also by the prompt (as transformers does)."""
        tail = tuple(token_ids[-self._longest_prefix :].tolist())
        for prefix, last in self._phrases:
            if tail[-len(prefix) :] == prefix:
                row[last] = _BANNED
