"""Llama 3: the whole answer is a JSON object `{"name": ..., "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before them. Without it nothing marks a call, so only an object that begins like one and
names a function of the request counts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from headrace.processing.tools.call import read_call
from headrace.processing.tools.reader import Malformed, Reader, Steps

TAG = "<|python_tag|>"


class Llama3Parser:
    """Code behind the tag, as the built-in tools have it, stays content."""

    markers: ClassVar[tuple[str, ...]] = (TAG,)

    def __init__(self, tool_names: Collection[str]) -> None:
        self._tool_names = tool_names
        reader = Reader(self._read)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        if (yield from reader.peek_past_space()) == "{":
            yield from self._calls(reader, self._tool_names)
        reader.reject()
        while (yield from reader.content_until(TAG)):
            yield from self._calls(reader, None)

    def _calls(self, reader: Reader, known: Collection[str] | None) -> Steps[None]:
        try:
            yield from read_call(reader, known=known)
            while (yield from reader.peek_past_space()) in (";", "{"):
                yield from reader.take(";")
                yield from read_call(reader, known=known)
        except Malformed:
            pass
        reader.reject()
