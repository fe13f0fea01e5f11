"""The JSON of SGLang's /generate: `{text, output_ids, meta_info}` per choice, whole or as a stream of all so far.

`meta_info` speaks of one prompt and one choice. What a control operation has ended comes with what it has;
`finish_reason` is of type abort then, and says "Abort before prefill" where that is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ErrorInfo
from headrace.processing.logprobs import TokenLogprob, TopLogprob
from headrace.processing.outputs import TextDelta
from headrace.processing.tokenizer import Tokenizer
from headrace.server.protocol.generate import LogprobWish
from headrace.server.shape import ChoiceParts, PromptRows
from headrace.server.sse import DONE, encode, error_end
from headrace.types import FinishReason, Usage

BEFORE_PREFILL = "Abort before prefill"  # trainers look for these words
ABORTED = "Aborted by a control operation"

Entry = list[Any]  # [logprob, token id, text or null]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateShape:
    """How the sender wants the reply."""

    ids: Sequence[str]  # by prompt
    prompts: tuple[tuple[int, ...], ...]
    n: int
    wishes: Sequence[LogprobWish | None]  # by prompt
    with_text: bool  # return_text_in_logprobs
    is_single: bool  # an object, no list
    scores_only: bool  # max_new_tokens: 0
    weights_version: str  # of choices without a token


class GenerateReply:
    """`Reply` of /generate."""

    def __init__(self, shape: GenerateShape, tokenizer: Tokenizer) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._so_far: dict[int, ChoiceParts] = {}
        self._prompt_rows = PromptRows(shape.n)

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> Any:
        for index, parts in enumerate(choices):
            self._prompt_rows.of(index, parts.prompt_logprobs)
        outputs = [self._output(index, parts) for index, parts in enumerate(choices)]
        return outputs[0] if self._is_object else outputs

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        frames = []
        for delta in deltas:
            parts = self._so_far.setdefault(delta.choice, ChoiceParts())
            parts.add(delta)
            self._prompt_rows.of(delta.choice, parts.prompt_logprobs)
            if delta.token_ids or delta.text or delta.finish_reason is not None:
                output = self._output(delta.choice, parts)
                output = output if self._is_object else {**output, "index": delta.choice}
                frames.append(b"data: %b\n\n" % encode(output))
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        return DONE

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        return error_end(info)

    @property
    def _is_object(self) -> bool:
        return self._shape.is_single and self._shape.n == 1

    def _output(self, index: int, parts: ChoiceParts) -> dict[str, Any]:
        shape = self._shape
        prompt = index // shape.n
        token_ids = [] if shape.scores_only else parts.token_ids
        meta: dict[str, Any] = {
            "id": shape.ids[prompt],
            "finish_reason": self._finish(parts),
            "prompt_tokens": len(shape.prompts[prompt]),
            "completion_tokens": len(token_ids),
            "cached_tokens": parts.num_cached_tokens,
            "weight_version": parts.versions.last or shape.weights_version,
            "weight_versions": [] if shape.scores_only else parts.versions.spans(),
        }
        wish = shape.wishes[prompt]
        if wish is not None:
            rows = [] if shape.scores_only else parts.logprobs
            meta |= self._columns("output", [], rows, wish)
            meta |= self._of_prompt(index, prompt, wish)
        return {"text": "" if shape.scores_only else "".join(parts.text), "output_ids": token_ids, "meta_info": meta}

    def _finish(self, parts: ChoiceParts) -> dict[str, Any] | None:
        reason = parts.finish_reason
        if reason is None:
            return None
        if reason is FinishReason.ABORT:
            return {"type": "abort", "message": ABORTED if parts.token_ids else BEFORE_PREFILL}
        if self._shape.scores_only:
            return {"type": "length", "length": 0}
        if reason is FinishReason.LENGTH:
            return {"type": "length", "length": len(parts.token_ids)}
        matched = parts.stop_reason
        if matched is None and parts.token_ids:
            matched = parts.token_ids[-1]  # the end-of-sequence token
        return {"type": "stop", "matched": matched}

    def _of_prompt(self, index: int, prompt: int, wish: LogprobWish) -> dict[str, Any]:
        """From the wished token on; the first one counts as without a logprob, as in SGLang."""
        token_ids = self._shape.prompts[prompt]
        if not 0 <= wish.start < len(token_ids):
            return self._columns("input", [], [], wish)
        rows = self._prompt_rows.of(index, [])  # from the second token on
        return self._columns("input", [token_ids[wish.start]], rows[wish.start :], wish)

    def _columns(
        self, side: str, first: Sequence[int], rows: Sequence[TokenLogprob], wish: LogprobWish
    ) -> dict[str, Any]:
        """`first`: tokens before the rows that have no logprob."""
        columns: dict[str, Any] = {
            f"{side}_token_logprobs": [
                *([None, token_id, self._text(token_id)] for token_id in first),
                *(self._entry(row) for row in rows),
            ]
        }
        nothing: list[Any] = [None] * len(first)
        if wish.num_top:
            columns[f"{side}_top_logprobs"] = nothing + [
                [self._entry(entry) for entry in row.top[: wish.num_top]] for row in rows
            ]
        if wish.token_ids:
            columns[f"{side}_token_ids_logprobs"] = nothing + [self._of_ids(row, wish.token_ids) for row in rows]
        return columns

    def _of_ids(self, row: TokenLogprob, token_ids: Sequence[int]) -> list[Entry]:
        by_id = {entry.token_id: entry for entry in row.top}
        return [self._entry(by_id[token_id]) for token_id in token_ids if token_id in by_id]

    def _entry(self, entry: TokenLogprob | TopLogprob) -> Entry:
        return [entry.logprob, entry.token_id, entry.token if self._shape.with_text else None]

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._shape.with_text else None
