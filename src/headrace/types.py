"""The nouns that every layer shares: ids, sampling parameters, finish reasons, log probabilities, usage.

They are msgspec structs because some of them travel inside messages (`transport/messages.py`); they hold no behaviour
beyond what follows from their own fields. Validation of what a user sent lives in `processing/validate.py`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

import msgspec
import numpy as np

RequestId = NewType("RequestId", int)
"""Unique within one client (front end); the engine keys a request by (client, request id)."""
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

ALL_LOGPROBS = -1
"""Value of `logprobs` and `prompt_logprobs` that asks for the whole vocabulary."""


class FinishReason(IntEnum):
    """Why a choice ended. Exactly one of these closes every accepted choice."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def label(self) -> str:
        """The word on the wire: stop, length, abort, error."""
        return self.name.lower()


POOLINGS = ("last", "mean")
"""How the hidden states of a prompt become one vector: that of its last token, or the mean of all."""


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What an output must match, whatever the request called it. `grammar/` compiles it."""

    kind: str  # json_schema, regex, lark or llguidance (several of them); others become one of these on their way in
    text: str


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """How long an output may think before its answer. The markers of the thoughts are not counted."""

    is_open: bool  # the prompt has opened the thoughts; else the output may, at its beginning
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]  # not empty
    max_tokens: int


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens of one request are chosen and when generation ends.

    Text fields (`stop`, `include_stop_str_in_output`, `bad_words`, `skip_special_tokens`) are acted on by the front
    end, which owns the tokenizer; the engine reads only the fields that speak of token ids.
    """

    n: int = 1
    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # choice i of n uses seed + i
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # None: none; 0: of the sampled token; N: and the N most likely; -1: the vocabulary
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None  # what the output must match
    thinking: ThinkingBudget | None = None
    pooling: str | None = None  # last or mean: the prompt's vector is wanted, and no token


class LogprobRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities of consecutive tokens, as columns.

    Each of the `num_rows` rows has `width` entries: the token that was sampled (or stands in the prompt) first, then
    the most likely ones in falling order. Log probabilities are of the model's raw distribution, before temperature,
    penalties and masks, in natural log.
    """

    num_rows: int
    width: int
    token_ids: bytes  # int32 [num_rows, width]
    logprobs: bytes  # float32 [num_rows, width]
    ranks: bytes  # int32 [num_rows], rank of the row's own token, 1 is the most likely

    @classmethod
    def from_arrays(cls, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> LogprobRows:
        num_rows, width = token_ids.shape
        return cls(
            num_rows,
            width,
            np.ascontiguousarray(token_ids, np.int32).tobytes(),
            np.ascontiguousarray(logprobs, np.float32).tobytes(),
            np.ascontiguousarray(ranks, np.int32).tobytes(),
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read-only views: token ids [rows, width], log probabilities [rows, width], ranks [rows]."""
        shape = (self.num_rows, self.width)
        return (
            np.frombuffer(self.token_ids, np.int32).reshape(shape),
            np.frombuffer(self.logprobs, np.float32).reshape(shape),
            np.frombuffer(self.ranks, np.int32),
        )

    def __add__(self, other: LogprobRows) -> LogprobRows:
        assert self.width == other.width, "rows of one request have one width"
        return LogprobRows(
            self.num_rows + other.num_rows,
            self.width,
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            self.ranks + other.ranks,
        )


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one public request: the prompt once, completions summed over choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion's

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
