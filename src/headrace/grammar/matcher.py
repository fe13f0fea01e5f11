"""Follows one output through its grammar. The runner holds one per constrained sequence.

`mask` may run in another thread than `accept`, never at the same time. Nothing here raises: a matcher that has failed
says why.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_EIGHT = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))
"""What each byte of a bit mask stands for: eight tokens, the lowest bit first."""


class Matcher:
    """One sequence. Its state is a function of the grammar and the tokens that it accepted."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = np.empty((-(-vocab_size // 32) * 4, 8), np.float32)

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""
        return reason_of(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def accept(self, *token_ids: int) -> None:
        """The output has got these tokens. After its end any token may come, and changes nothing."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    def mask(self) -> np.ndarray | None:
        """To be added to logits, float32 [V]: 0 for tokens that may come next, -inf for others; None if it has failed.
        Valid until the next call, and the caller's to change. CPU work, most of it without the GIL."""
        if self._matcher.is_error():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return None
        bits = bits[: self._mask.shape[0]]  # llguidance may have a word more
        np.take(_EIGHT, bits, axis=0, out=self._mask, mode="clip")  # the mode is the fast one
        return self._mask.reshape(-1)[: self._vocab_size]


def reason_of(message: str) -> str:
    """llguidance's reason on one line, without its picture of the place."""
    first, *others = message.strip().split("\n")
    return " ".join([first, *(line for line in others if line.startswith("error:"))])[:400]
