"""Takes apart text with one block of thoughts between two markers, at its beginning. The styles are built on it.

White space at both ends of the thoughts and before the answer belongs to the format and is dropped; an answer without
thoughts before it comes out unchanged.
"""

from __future__ import annotations

from headrace.processing.reasoning.base import Opening, Phase, Split, start_of_marker


class TagSplitter:
    """The machine of one choice, in the phase that the prompt has left it in."""

    def __init__(self, opener: str, closer: str, phase: Phase, *, label: str = "") -> None:
        """`label`: a word that the format writes behind the opener; it is no thought."""
        self.phase = phase
        self.has_thought = phase is Phase.THINKING
        self._opener = opener
        self._closer = closer
        self._label = label
        self._held = ""
        self._is_opening = True  # nothing of the thoughts has been given out
        self._is_blank = False  # nothing of the answer has come since the thoughts' end

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> Split:
        if self.phase is Phase.ANSWER and not self._is_blank:
            return Split("", text)
        text, self._held = self._held + text, ""
        if self.phase is Phase.START and not self._start(text):
            return Split("", "")
        if self.phase is Phase.ANSWER:
            return Split("", self._answer(text))
        if self._is_opening:
            if (rest := self._open(text)) is None:
                self._held = text
                return Split("", "")
            text = rest
        return self._think(text)

    def finish(self) -> Split:
        """An end amid the opener leaves content; an end amid thoughts, thoughts."""
        text, self._held = self._held, ""
        if self.phase is not Phase.THINKING:
            return Split("", text)
        if self._is_opening and (text := text.lstrip()).startswith(self._opener):
            text = text[len(self._opener) :]
            text = "" if self._label.startswith(text) else text
        return Split(text.rstrip(), "")

    def _start(self, text: str) -> bool:
        """Decides whether the text begins with thoughts; False while it may or may not."""
        stripped = text.lstrip()
        if stripped.startswith(self._opener):
            self.phase, self.has_thought = Phase.THINKING, True
        elif self._opener.startswith(stripped):
            self._held = text
            return False
        else:
            self.phase = Phase.ANSWER
        return True

    def _open(self, text: str) -> str | None:
        """The text without opener and label, which come only once; None while they may still come."""
        text = text.lstrip()
        for part in (self._opener, self._label):
            if text.startswith(part):
                text = text[len(part) :]
            elif part.startswith(text):
                return None
        text = text.lstrip()
        self._is_opening = not text
        return text or None

    def _think(self, text: str) -> Split:
        end = text.find(self._closer)
        if end >= 0:
            self.phase, self._is_blank = Phase.ANSWER, True
            return Split(text[:end].rstrip(), self._answer(text[end + len(self._closer) :]))
        thoughts = text[: start_of_marker(text, self._closer)].rstrip()
        self._held = text[len(thoughts) :]
        return Split(thoughts, "")

    def _answer(self, text: str) -> str:
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text


def phase_after(opening: Opening, opener: str, closer: str, otherwise: Phase) -> Phase:
    """The phase in which the prompt leaves a choice: it may end with a marker, or continue a message that holds one."""
    text = opening.text.rstrip()
    if opening.is_message and text:
        return Phase.THINKING if text.rfind(opener) > text.rfind(closer) else Phase.ANSWER
    if text.endswith(opener):
        return Phase.THINKING
    return Phase.ANSWER if text.endswith(closer) else otherwise
