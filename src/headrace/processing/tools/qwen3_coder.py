"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

Each tag and each value has a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from headrace.processing.tools.reader import Malformed, Reader, Steps
from headrace.processing.tools.tagged import Arguments

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\n]*")


class Qwen3CoderParser:
    """Text may stand before, between and after the calls."""

    markers: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        reader = Reader(self._read)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(START)):
            try:
                yield from self._call(reader)
                yield from reader.space()
                yield from reader.take_end(END)
                reader.accept()
            except Malformed:
                yield from reader.recover(END)

    def _call(self, reader: Reader) -> Steps[None]:
        reader.begin()
        yield from reader.space()
        yield from reader.expect(FUNCTION)
        name = yield from reader.match(_NAME)
        yield from reader.expect(">")
        if not name.strip():
            raise Malformed
        arguments = Arguments(reader, name.strip(), self._tools)
        while (yield from reader.peek_past_space()) and (yield from reader.take_end(PARAMETER)):
            key = yield from reader.match(_NAME)
            yield from reader.expect(">")
            if not arguments.is_new(key):
                raise Malformed
            yield from arguments.read(key, PARAMETER_END, "\n")
        if not (yield from reader.take_end(FUNCTION_END)):
            raise Malformed
        arguments.close()
