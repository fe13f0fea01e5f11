"""DeepSeek V3, R1 and V3.1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

V3 and R1 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line break, the arguments as a block of Markdown
and `<｜tool▁call▁end｜>`; V3.1 writes the name in the place of `function` and the arguments bare.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from headrace.processing.tools.reader import Malformed, Reader, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE = "```"
_NAME = re.compile(r"[^<\n]*")
_LANGUAGE = re.compile(r"[a-z]*")


class DeepSeekV3Parser:
    """Both forms; which it is shows behind the separator."""

    markers: ClassVar[tuple[str, ...]] = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

    def __init__(self, tool_names: Collection[str]) -> None:
        reader = Reader(self._read)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(CALLS)):
            try:
                yield from reader.space()
                yield from reader.expect(CALL)
                while True:
                    yield from self._call(reader)
                    yield from reader.space()
                    if not (yield from reader.take(CALL)):
                        break
                yield from reader.take_end(CALLS_END)
                reader.accept()
            except Malformed:
                yield from reader.recover(CALL_END)

    def _call(self, reader: Reader) -> Steps[None]:
        """One call behind its marker."""
        reader.begin()
        name = yield from reader.match(_NAME)
        yield from reader.expect(SEPARATOR)
        has_fence = (yield from reader.peek_past_space()) != "{"
        if has_fence:
            name = yield from reader.match(_NAME)
            yield from reader.space()
            yield from reader.expect(FENCE)
            yield from reader.match(_LANGUAGE)
        name = name.strip()
        if not name or (yield from reader.peek_past_space()) != "{":
            raise Malformed
        reader.open_call(name)
        yield from reader.json_arguments()
        yield from reader.space()
        if has_fence:
            yield from reader.take_end(FENCE)
            yield from reader.space()
        yield from reader.take_end(CALL_END)
        reader.accept()
