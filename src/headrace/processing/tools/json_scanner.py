"""Follows one JSON value through text that comes in pieces, character by character, strictly by RFC 8259.

Used by `reader.py` to pass arguments on while they are being written. It keeps no text.
"""

from __future__ import annotations

import re
from enum import Enum

SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class _State(Enum):
    VALUE = 0
    VALUE_OR_END = 1  # after [
    KEY_OR_END = 2  # after {
    KEY = 3
    COLON = 4
    MORE_OR_END = 5
    STRING = 6
    ESCAPE = 7
    HEX = 8
    WORD = 9  # a number, true, false, null
    DONE = 10


class JsonScanner:
    """One value. After `is_done` or `is_broken` it must not be used any more."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._state = _State.VALUE
        self._open: list[str] = []  # the closing brackets that are due, the next one last
        self._is_key = False
        self._num_hex = 0

    def scan(self, text: str, start: int, *, is_last: bool = False) -> int:
        """How far the value goes in `text` from `start` on, as far as it is certain: a number or a word counts only
        once it is whole. The next scan goes on from there. `is_last`: nothing comes after the text."""
        position, end = start, len(text)
        while not self.is_done and not self.is_broken:
            if self._state is _State.STRING:
                found = _PLAIN.match(text, position)
                position = found.end() if found else position
            elif self._state not in (_State.ESCAPE, _State.HEX, _State.WORD):
                found = _SPACE.match(text, position)
                position = found.end() if found else position
            if self._state is _State.WORD:
                found = _WORD.match(text, position)
                stop = found.end() if found else position
                if stop == end and (self._open or not is_last):
                    break
                self._word(text[position:stop])
                position = position if self.is_broken else stop
            elif position >= end:
                break
            elif self._take(text[position]):
                position += 1
        return position

    def rest(self) -> str:
        """What would make the value whole from here."""
        state, text = self._state, ""
        if state in (_State.STRING, _State.ESCAPE, _State.HEX):
            escape = "\\" if state is _State.ESCAPE else "0" * (4 - self._num_hex) if state is _State.HEX else ""
            state, text = (_State.COLON if self._is_key else _State.MORE_OR_END), escape + '"'
        elif state is _State.KEY:
            state, text = _State.COLON, '""'
        if state is _State.COLON:
            text += ":"
        if state in (_State.COLON, _State.VALUE, _State.WORD):
            text += "null"
        return text + "".join(reversed(self._open))

    def _word(self, word: str) -> None:
        if _SCALAR.fullmatch(word):
            self._end_value()
        else:
            self.is_broken = True

    def _take(self, char: str) -> bool:
        """Whether the character is used up; sets `is_broken` where it cannot come."""
        state = self._state
        if state in (_State.STRING, _State.ESCAPE, _State.HEX):
            self._in_string(char)
        elif state in (_State.VALUE, _State.VALUE_OR_END) and char not in "]},:":
            return self._begin_value(char)
        elif state in (_State.KEY, _State.KEY_OR_END) and char == '"':
            self._state, self._is_key = _State.STRING, True
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.MORE_OR_END and char == ",":
            self._state = _State.KEY if self._open[-1] == "}" else _State.VALUE
        elif (
            state in (_State.MORE_OR_END, _State.KEY_OR_END, _State.VALUE_OR_END)
            and self._open
            and char == self._open[-1]
        ):
            self._open.pop()
            self._end_value()
        else:
            self.is_broken = True
        return not self.is_broken

    def _begin_value(self, char: str) -> bool:
        if char == "{":
            self._open.append("}")
            self._state = _State.KEY_OR_END
        elif char == "[":
            self._open.append("]")
            self._state = _State.VALUE_OR_END
        elif char == '"':
            self._state, self._is_key = _State.STRING, False
        else:
            self._state = _State.WORD
            return False
        return True

    def _in_string(self, char: str) -> None:
        if self._state is _State.HEX:
            self._num_hex += 1
            self.is_broken = char not in "0123456789abcdefABCDEF"
            if self._num_hex == 4:
                self._state = _State.STRING
        elif self._state is _State.ESCAPE:
            self.is_broken = char not in '"\\/bfnrtu'
            self._state, self._num_hex = (_State.HEX, 0) if char == "u" else (_State.STRING, 0)
        elif char == "\\":
            self._state = _State.ESCAPE
        elif char == '"':
            if self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        else:
            self.is_broken = True  # a control character

    def _end_value(self) -> None:
        self.is_done = not self._open
        self._state = _State.MORE_OR_END if self._open else _State.DONE


def completion(text: str) -> str:
    """What must follow the beginning of a JSON value, whose last word is whole, so that it is one."""
    scanner = JsonScanner()
    position = scanner.scan(text, 0)
    if position < len(text):
        scanner.scan(text + " ", position)
    return scanner.rest()
