"""ERNIE X1 and ERNIE 4.5 Thinking: thoughts up to `</think>`, then tool calls or `<response>...</response>`."""

from __future__ import annotations

from typing import ClassVar

from headrace.processing.reasoning.base import Opening, Phase, Split, start_of_marker
from headrace.processing.reasoning.styles import CLOSER, OPENER
from headrace.processing.reasoning.tags import TagSplitter, phase_after

RESPONSE, RESPONSE_END = "<response>", "</response>"


class ErnieX1Parser:
    """Thinks from the start, as the template opens the thoughts."""

    tags: ClassVar[tuple[str, str]] = (OPENER, CLOSER)
    markers: ClassVar[tuple[str, ...]] = (OPENER, CLOSER, RESPONSE, RESPONSE_END)

    def __init__(self, opening: Opening) -> None:
        self._tags = TagSplitter(OPENER, CLOSER, phase_after(opening, OPENER, CLOSER, Phase.THINKING))
        self._response = _Response()

    @property
    def phase(self) -> Phase:
        return self._tags.phase

    @property
    def has_thought(self) -> bool:
        return self._tags.has_thought

    @property
    def num_held(self) -> int:
        return self._tags.num_held + self._response.num_held

    def feed(self, text: str) -> Split:
        reasoning, content = self._tags.feed(text)
        return Split(reasoning, self._response.feed(content) if content else "")

    def finish(self) -> Split:
        reasoning, content = self._tags.finish()
        return Split(reasoning, self._response.feed(content) + self._response.finish())


class _Response:
    """Takes the envelope off an answer that has one, with the line breaks inside it."""

    def __init__(self) -> None:
        self._held = ""
        self._seeks: str | None = RESPONSE  # the marker that may come next
        self._is_blank = False  # nothing has come since the last marker

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._seeks == RESPONSE:
            stripped = text.lstrip()
            if RESPONSE.startswith(stripped) and stripped != RESPONSE:
                self._held = text
                return ""
            if not stripped.startswith(RESPONSE):
                self._seeks = None
                return text
            self._seeks, self._is_blank = RESPONSE_END, True
            text = stripped[len(RESPONSE) :]
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text if self._seeks is None else self._inside(text)

    def _inside(self, text: str) -> str:
        end = text.find(RESPONSE_END)
        if end >= 0:
            self._seeks, self._is_blank = None, True
            return text[:end].rstrip() + self.feed(text[end + len(RESPONSE_END) :])
        known = text[: start_of_marker(text, RESPONSE_END)].rstrip()
        self._held = text[len(known) :]
        return known

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text.rstrip() if self._seeks == RESPONSE_END else text
