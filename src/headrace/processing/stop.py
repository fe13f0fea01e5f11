"""Finds stop strings in text that comes in parts, and holds back what may still turn out to begin one.

Called by `ChoiceAssembler` (outputs.py). The match that ends first wins, and of those that end together the longest. A
result never depends on how the text was cut into parts. It knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One choice's search. Once it has matched, nothing more comes out."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._include = include
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self._num_emitted = 0
        self.matched: str | None = None
        self.match_start = -1  # where the match begins in the whole text, once there is one

    @property
    def num_emitted(self) -> int:
        """Characters that came out so far."""
        return self._num_emitted

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that is safe to emit now. Not `armed`: a match that ends in this text does not count."""
        if self.matched is not None or not text:
            return ""
        num_held = len(self._held)
        text = self._held + text
        if armed and (found := self._find(text, num_held)) is not None:
            start, stop = found
            self.matched, self.match_start = stop, self._num_emitted + start
            self._held = ""
            return self._emit(text[: start + len(stop)] if self._include else text[:start])
        keep = self._start_of_candidate(text)
        self._held = text[keep:]
        return self._emit(text[:keep])

    def flush(self) -> str:
        """The text that was held back and can begin nothing any more."""
        text, self._held = self._held, ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        self._num_emitted += len(text)
        return text

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The first match that ends after the first `num_old` characters: those have been searched before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:  # longest first, so that of two that end together the longest stays
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _start_of_candidate(self, text: str) -> int:
        """Where the longest end of the text begins that a stop string begins with; the text's length if none does."""
        if not self._stops:
            return len(text)
        for start in range(max(0, len(text) - len(self._stops[0]) + 1), len(text)):
            if text[start] in self._first_chars:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
