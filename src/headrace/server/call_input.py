"""The arguments of a call as an object, which Anthropic's clients want, whatever the model wrote.

What is no whole object, because it was cut off or broke, is completed, and its text stands in it under `INVALID_JSON`.
A stream sends the same object in pieces.
"""

from __future__ import annotations

from headrace.processing.tools.json_scanner import JsonScanner, completion
from headrace.server.sse import encode

BROKEN = "INVALID_JSON"


class CallInput:
    """Of one call. What `feed` and `finish` return adds up to a JSON object, or to nothing where nothing was fed."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._text = ""
        self._num_sent = 0

    def feed(self, text: str) -> str:
        """What is certain to be part of an object."""
        self._text += text
        scanner, start = self._scanner, self._num_sent
        if not self._text.startswith("{") or scanner.is_done or scanner.is_broken:
            return ""
        self._num_sent = scanner.scan(self._text, start)
        return self._text[start : self._num_sent]

    def finish(self) -> str:
        """What is lacking at the end."""
        if self._scanner.is_done or not self._text:
            return ""
        sent = self._text[: self._num_sent] or "{"
        rest = completion(sent)[:-1]
        comma = "" if (sent + rest).rstrip() == "{" else ","
        begun = "" if self._num_sent else "{"
        return f"{begun}{rest}{comma}{encode(BROKEN).decode()}:{encode(self._text).decode()}}}"


def whole_input(arguments: str) -> str:
    """The JSON of an object."""
    whole = CallInput()
    return whole.feed(arguments) + whole.finish() or "{}"
