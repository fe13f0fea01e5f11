"""Cuts a delta into one per token, as the engine would have sent them to a reader that is fast enough.

`outputs.py` does so where log probabilities must be told apart by what their tokens became, a message or a call.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from headrace.client.base import Delta
from headrace.types import LogprobRows


def by_token(delta: Delta) -> Iterator[Delta]:
    """The same in order: what speaks of the beginning stays with the first token, the end with the last."""
    num_tokens = len(delta.token_ids)
    if num_tokens < 2:
        yield delta
        return
    rows = None if delta.logprobs is None else delta.logprobs.arrays()
    for index, token_id in enumerate(delta.token_ids):
        part = Delta(delta.choice, [token_id]) if index else replace(delta, token_ids=[token_id])
        if rows is not None:
            part.logprobs = LogprobRows.from_arrays(*(column[index : index + 1] for column in rows))
        is_last = index == num_tokens - 1
        part.finish_reason = delta.finish_reason if is_last else None
        part.stop_token_id = delta.stop_token_id if is_last else None
        part.error = delta.error if is_last else None
        part.weights_versions = tuple((0, version) for at, version in delta.weights_versions if at == index)
        yield part
