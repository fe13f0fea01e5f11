"""Hermes, Qwen 2.5 and 3, ERNIE X1: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from headrace.processing.tools.call import read_call
from headrace.processing.tools.reader import Malformed, Reader, Steps

START, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Text may stand before, between and after the calls."""

    markers: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, tool_names: Collection[str]) -> None:
        reader = Reader(self._read)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(START)):
            try:
                yield from read_call(reader)
                yield from reader.space()
                yield from reader.take_end(END)
                reader.accept()
            except Malformed:
                yield from reader.recover(END)
