"""Log probabilities in the shapes of the replies: chat's `content[]`, completions' columns, vLLM's prompt logprobs.

The entries come from `processing/logprobs.py`, which has made every number one that JSON can write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.processing.logprobs import TokenLogprob, TopLogprob

Entry = TokenLogprob | TopLogprob


def token_text(entry: Entry, as_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_ids else entry.token


def chat_logprobs(rows: Sequence[TokenLogprob], num_top: int, as_ids: bool) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or chunk. `num_top` < 0: all."""
    return {"content": [_chat_token(row, num_top, as_ids) for row in rows], "refusal": None}


def _chat_token(row: TokenLogprob, num_top: int, as_ids: bool) -> dict[str, Any]:
    top = row.top if num_top < 0 else row.top[:num_top]
    return {
        "token": token_text(row, as_ids),
        "logprob": row.logprob,
        "bytes": list(row.bytes),
        "top_logprobs": [
            {"token": token_text(entry, as_ids), "logprob": entry.logprob, "bytes": list(entry.bytes)} for entry in top
        ],
    }


class CompletionLogprobs:
    """The columns of completions' `logprobs` for one choice; text offsets go on from chunk to chunk."""

    def __init__(self, num_top: int, as_ids: bool) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def columns(self, rows: Sequence[TokenLogprob], first: tuple[int, str] | None = None) -> dict[str, Any]:
        """`first` is an (id, text) before the rows that has no log probability: a prompt's first token."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []

        def add(token: str, length: int, logprob: float | None, top: dict[str, float] | None) -> None:
            tokens.append(token)
            token_logprobs.append(logprob)
            top_logprobs.append(top)
            text_offset.append(self._offset)
            self._offset += length

        if first is not None:
            add(f"token_id:{first[0]}" if self._as_ids else first[1], len(first[1]), None, None)
        for row in rows:
            add(token_text(row, self._as_ids), len(row.token), row.logprob, self._top(row))
        return {
            "text_offset": text_offset,
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }

    def _top(self, row: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and always the row's own. Of two ids with one text the likelier counts."""
        top: dict[str, float] = {}
        for entry in row.top if self._num_top < 0 else row.top[: self._num_top]:
            top.setdefault(token_text(entry, self._as_ids), entry.logprob)
        top.setdefault(token_text(row, self._as_ids), row.logprob)
        return top


def prompt_logprobs(
    rows: Sequence[TokenLogprob], as_ids: bool, num_top: int = -1
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: null for the first token, then by token id {logprob, rank, decoded_token}. `num_top` < 0: all."""
    shaped: list[dict[str, dict[str, Any]] | None] = [None]
    for row in rows:
        entries = {str(row.token_id): _prompt_entry(row, as_ids)}
        for entry in row.top if num_top < 0 else row.top[:num_top]:
            entries.setdefault(str(entry.token_id), _prompt_entry(entry, as_ids))
        shaped.append(entries)
    return shaped


def _prompt_entry(entry: Entry, as_ids: bool) -> dict[str, Any]:
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": token_text(entry, as_ids)}
