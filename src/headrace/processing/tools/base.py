"""What every tool parser is: the content of one choice in, content and pieces of tool calls out.

`outputs.py` feeds it what reasoning and stop strings have left; the registry (`parsing.py`) makes one per choice. The
parsers are built on `reader.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class ToolCallDelta:
    """What is new of one call. The first delta of a call brings id and name, the only ones with them, and where in the
    content it stands: behind that many characters of it, or None for all that has come."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    position: int | None = None


@dataclass(slots=True)
class ToolOutput:
    """What a piece of text has brought, content and calls each in their order."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser(Protocol):
    """One choice. Concatenated, its outputs never depend on how the text was cut into pieces."""

    def feed(self, text: str) -> ToolOutput:
        """What is certain now. Never raises: text that is no call, or the rest of one that breaks off, is content."""
        ...

    def finish(self) -> ToolOutput:
        """What was held back, once nothing more comes."""
        ...


class ToolParserType(Protocol):
    """The class of a parser, as the registry holds it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a parser must see even where they are special tokens, which are otherwise left out."""
        ...

    def __call__(self, tools: Mapping[str, Any], /) -> ToolParser:
        """`tools`: the functions that the request offers, with the schemas of their parameters."""
        ...
