"""Reads the content of one choice for a tool parser, and collects what the parser makes of it.

A parser is a generator over a `Reader`: it reads as if all text were there, and the reader suspends it (`yield`) where
more is needed. So the result cannot depend on how the text is cut, and each format is written in the order in which
the model writes it. Text that has been read is held until the parser accepts it as part of a call or gives it back as
content:

    text   ...said | <tool_call> {"name": ...  | not read yet
                   0             held          pos
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Generator
from typing import TypeVar

from headrace.processing.reasoning.base import start_of_marker
from headrace.processing.tools.base import ToolCallDelta, ToolOutput
from headrace.processing.tools.json_scanner import SPACE, JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]


class Malformed(Exception):
    """What was read is no call. Never leaves a parser."""


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _in_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Reader:
    """The text of one choice. White space around calls is dropped."""

    def __init__(self, read: Callable[[Reader], Steps[None]], new_id: Callable[[], str] = call_id) -> None:
        """`read` passes text on until there is none; what it leaves is content."""
        self._steps: Steps[None] | None = read(self)
        self._new_id = new_id
        self._text = ""
        self._pos = 0
        self._is_last = False
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._space: list[str] = []  # white space that a call may follow
        self._is_after_call = False
        self._num_calls = 0
        self._num_said = 0  # characters of content
        self.is_in_call = False
        """Whether a call has been opened since `begin`."""

    # ------------------------------------------------------------------ the parser's two methods

    def feed(self, text: str) -> ToolOutput:
        self._text += text
        return self._advance()

    def finish(self) -> ToolOutput:
        self._is_last = True
        return self._advance()

    def _advance(self) -> ToolOutput:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None or self._is_last:
            self._pos = len(self._text)
            self.reject()
        if self._is_last and not self._is_after_call:
            self._content += self._space
            self._space = []
        out = ToolOutput("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return out

    # ------------------------------------------------------------------ what becomes of the text

    def reject(self) -> None:
        """What is held was no call: it is content."""
        self._say(self._text[: self._pos])
        self.accept()

    def accept(self) -> None:
        """What is held is dealt with."""
        self._text, self._pos = self._text[self._pos :], 0

    def begin(self) -> None:
        self.is_in_call = False

    def open_call(self, name: str, id: str | None = None) -> None:
        """A call begins; what is held is part of it."""
        self.accept()
        self._calls.append(ToolCallDelta(self._num_calls, id or self._new_id(), name, "", self._num_said))
        self._num_calls += 1
        self._space, self._is_after_call, self.is_in_call = [], True, True

    def add_arguments(self, text: str) -> None:
        """Of the call that was opened last."""
        if text:
            index = self._num_calls - 1
            if self._calls and self._calls[-1].index == index:
                self._calls[-1].arguments += text
            else:
                self._calls.append(ToolCallDelta(index, arguments=text))

    def recover(self, end: str) -> Steps[None]:
        """After Malformed: an end marker that closes an open call all the same is dropped, and what the end of the text
        has cut; all else is content."""
        is_cut = self._is_last and self._pos == len(self._text)
        if self.is_in_call and (is_cut or (yield from self.take_end(end))):
            self.accept()
        else:
            self.reject()

    def _say(self, text: str) -> None:
        shown = text.rstrip(SPACE)
        if shown:
            said = "".join(self._space) + (shown.lstrip(SPACE) if self._is_after_call else shown)
            self._content.append(said)
            self._num_said += len(said)
            self._space, self._is_after_call = [], False
        if len(shown) < len(text) and not self._is_after_call:
            self._space.append(text[len(shown) :])

    # ------------------------------------------------------------------ reading

    def content_until(self, marker: str) -> Steps[bool]:
        """Gives out content up to the marker and reads that, as the first of what is held; False at the end."""
        assert self._pos == 0, "nothing is held between calls"
        while (start := self._text.find(marker)) < 0:
            self._pos = len(self._text) if self._is_last else start_of_marker(self._text, marker)
            self.reject()
            if self._is_last:
                return False
            yield
        self._pos = start
        self.reject()
        self._pos = len(marker)
        return True

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._pos >= len(self._text) and not self._is_last:
            yield
        return self._text[self._pos : self._pos + 1]

    def peek_past_space(self) -> Steps[str]:
        yield from self.space()
        return (yield from self.peek())

    def space(self) -> Steps[None]:
        while (char := (yield from self.peek())) and char in SPACE:
            self._pos += 1

    def take(self, literal: str) -> Steps[bool]:
        """Reads the literal if it comes next."""
        while not self._text.startswith(literal, self._pos):
            rest = self._text[self._pos :]
            if self._is_last or not literal.startswith(rest):
                return False
            yield
        self._pos += len(literal)
        return True

    def take_end(self, marker: str) -> Steps[bool]:
        """The same for a marker that the end of the text may cut."""
        if (yield from self.take(marker)):
            return True
        rest = self._text[self._pos :]
        if not rest or not marker.startswith(rest):
            return False
        self._pos = len(self._text)
        return True

    def expect(self, literal: str) -> Steps[None]:
        if not (yield from self.take(literal)):
            raise Malformed

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The longest text that is only characters of the pattern, `[...]*`."""
        end = self._pos
        while True:
            found = pattern.match(self._text, end)
            end = found.end() if found else end
            if end < len(self._text) or self._is_last:
                break
            yield
        text, self._pos = self._text[self._pos : end], end
        return text

    def text_until(self, marker: str, border: str = "") -> Steps[str]:
        """Reads the text up to the marker, without a border before that, and the marker; stays held."""
        while (end := self._text.find(marker, self._pos)) < 0:
            if self._is_last:
                self._pos = len(self._text)
                raise Malformed
            yield
        text, self._pos = self._text[self._pos : end], end + len(marker)
        return text.removesuffix(border)

    def string_until(self, marker: str, border: str = "") -> Steps[None]:
        """Passes the same text on as a JSON string, a part of the open call's arguments, while it comes."""
        self.add_arguments('"')
        self.accept()
        while (end := self._text.find(marker)) < 0:
            self._pos = min(start_of_marker(self._text, each) for each in (marker, border + marker))
            self.add_arguments(_in_quotes(self._text[: self._pos]))
            self.accept()
            if self._is_last:
                self._pos = len(self._text)
                raise Malformed
            yield
        self.add_arguments(_in_quotes(self._text[:end].removesuffix(border)) + '"')
        self._pos = end + len(marker)
        self.accept()

    def json_value(self) -> Steps[str]:
        """The text of the JSON value that comes next; stays held."""
        scanner, start = JsonScanner(), self._pos
        while True:
            self._pos = scanner.scan(self._text, self._pos, is_last=self._is_last)
            if scanner.is_done:
                return self._text[start : self._pos]
            if scanner.is_broken or self._is_last:
                raise Malformed
            yield

    def json_arguments(self) -> Steps[None]:
        """Passes the JSON value that comes next on, as the arguments of the open call."""
        scanner = JsonScanner()
        while True:
            self._pos = scanner.scan(self._text, self._pos, is_last=self._is_last)
            if self._is_last and not scanner.is_done and not scanner.is_broken:
                self._pos = len(self._text)
            self.add_arguments(self._text[: self._pos])
            self.accept()
            if scanner.is_done:
                return
            if scanner.is_broken or self._is_last:
                raise Malformed
            yield
