"""GLM-4.5: `<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each, and `</tool_call>`.

Strings are written as they are, all other values as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from headrace.processing.tools.reader import Malformed, Reader, Steps
from headrace.processing.tools.tagged import Arguments

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<\n]*")


class Glm45Parser:
    """Only functions of the request are called: nothing else tells a name from text."""

    markers: ClassVar[tuple[str, ...]] = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        reader = Reader(self._read)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(START)):
            try:
                yield from self._call(reader)
            except Malformed:
                yield from reader.recover(END)

    def _call(self, reader: Reader) -> Steps[None]:
        reader.begin()
        yield from reader.space()
        name = (yield from reader.match(_NAME)).strip()
        if name not in self._tools:
            raise Malformed
        arguments = Arguments(reader, name, self._tools)
        while (yield from reader.peek_past_space()) and (yield from reader.take_end(KEY)):
            key = (yield from reader.match(_NAME)).strip()
            yield from reader.expect(KEY_END)
            yield from reader.space()
            yield from reader.expect(VALUE)
            if not arguments.is_new(key):
                raise Malformed
            yield from arguments.read(key, VALUE_END)
        if not (yield from reader.take_end(END)):
            raise Malformed
        arguments.close()
