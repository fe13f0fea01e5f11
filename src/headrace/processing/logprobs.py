"""Log probabilities as the server shows them: columns of the engine become one entry per token, with text and bytes.

Called by `ChoiceAssembler` (outputs.py) for requests that ask for logprobs. The routes shape these entries for each
API; no number that JSON cannot write leaves here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.processing.tokenizer import Tokenizer
from headrace.types import LogprobRows

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity (a masked token), as in OpenAI's API: JSON has no infinity."""


@dataclass(slots=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int


@dataclass(slots=True)
class TokenLogprob:
    """The token at a position. `token` shows U+FFFD for part of a character, while `bytes` are exact."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int  # 1 is the most likely
    top: list[TopLogprob]


def token_logprobs(tokenizer: Tokenizer, rows: LogprobRows) -> list[TokenLogprob]:
    """One entry per row."""
    ids, logprobs, ranks = (column.tolist() for column in rows.arrays())
    text, data = tokenizer.token_text, tokenizer.token_bytes
    entries = []
    for row in range(rows.num_rows):
        token_id, *top_ids = ids[row]
        logprob, *top_logprobs = (_finite(value) for value in logprobs[row])
        top = [
            TopLogprob(top_id, text(top_id), data(top_id), top_logprob, rank)
            for rank, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1)
        ]
        entries.append(TokenLogprob(token_id, text(token_id), data(token_id), logprob, ranks[row], top))
    return entries


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
