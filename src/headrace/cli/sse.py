"""Reads the data lines of a server-sent event stream, as OpenAI-compatible servers send it. Used by chat and bench."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def data_of(line: str) -> str | None:
    """What a line carries; None for comments, blank lines, other fields and the closing [DONE]."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    return None if data in ("", "[DONE]") else data


def data_lines(lines: Iterable[str]) -> Iterator[str]:
    """The payloads of a stream's lines."""
    for line in lines:
        data = data_of(line)
        if data is not None:
            yield data
