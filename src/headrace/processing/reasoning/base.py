"""What every reasoning parser is: text of one choice in, thoughts and answer out.

`outputs.py` feeds it the detokenised text and asks for its phase around each token; the registry (`parsing.py`) makes
one per choice. It knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol


class Phase(Enum):
    """Where a choice is. It only ever moves on."""

    START = "start"  # nothing has been said that decides
    THINKING = "thinking"
    ANSWER = "answer"


class Split(NamedTuple):
    """A piece of text, taken apart."""

    reasoning: str
    content: str


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known before the first token: the end of the rendered prompt, or all of a message that is continued."""

    text: str
    is_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class ReasoningParser(Protocol):
    """One choice. Concatenated, its outputs never depend on how the text was cut into pieces."""

    @property
    def phase(self) -> Phase: ...

    @property
    def has_thought(self) -> bool:
        """Whether there are or were thoughts, be they empty."""
        ...

    @property
    def num_held(self) -> int:
        """Characters that came in and are neither given out nor dropped yet."""
        ...

    def feed(self, text: str) -> Split:
        """What is certain now. Never raises: what fits no style is content."""
        ...

    def finish(self) -> Split:
        """What was held back, once nothing more comes."""
        ...


class ReasoningParserType(Protocol):
    """What makes the parsers of one style: a class, most often. It may have `tags`, the texts that open and close the
    thoughts: without them a form binds the thoughts too, and they cannot be given a budget."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a parser must see even where they are special tokens, which are otherwise left out."""
        ...

    def __call__(self, opening: Opening) -> ReasoningParser: ...


def start_of_marker(text: str, marker: str) -> int:
    """Where the longest end of `text` begins that `marker` begins with; the text's length if none does."""
    for index in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[index:]):
            return index
    return len(text)
