"""A reply in the order in which the model wrote it: thoughts, then text and calls as they came.

`/v1/responses` and `/v1/messages` are made of such parts, whole or as a stream. A call knows how many characters of
content stand before it, so the order does not depend on how the tokens were cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.processing.tools import ToolCallDelta
from headrace.server.shape import CallParts, ChoiceParts


@dataclass(frozen=True, slots=True)
class Thoughts:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    rows: Sequence[TokenLogprob] = field(default=())  # that came before the next call


def parts_of(choice: ChoiceParts) -> list[Thoughts | Text | CallParts]:
    """All parts of a choice so far; none is empty but a call."""
    parts: list[Thoughts | Text | CallParts] = []
    if thoughts := "".join(choice.reasoning):
        parts.append(Thoughts(thoughts))
    text, start, first_row = "".join(choice.text), 0, 0
    for position, group in groupby(choice.calls, lambda call: call.position):
        calls = list(group)
        if text[start:position]:
            parts.append(Text(text[start:position], choice.logprobs[first_row : calls[0].num_rows]))
        parts += calls
        start, first_row = max(start, position), calls[-1].num_rows
    if text[start:]:
        parts.append(Text(text[start:], choice.logprobs[first_row:]))
    return parts


def in_order(delta: TextDelta, num_chars: int) -> Iterator[str | ToolCallDelta]:
    """Text and calls of a delta; `num_chars`: of content before it. More of a call precedes all text."""
    start = 0
    for call in delta.calls:
        stop = start
        if call.id is not None:
            stop = len(delta.text) if call.position is None else max(start, call.position - num_chars)
        if delta.text[start:stop]:
            yield delta.text[start:stop]
        start = stop
        yield call
    if delta.text[start:]:
        yield delta.text[start:]
