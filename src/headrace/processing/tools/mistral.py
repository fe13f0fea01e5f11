"""Mistral: `[TOOL_CALLS]`, then `[{"name": ..., "arguments": {...}}, ...]`, or from version 11 on `name[ARGS]{...}`.

The newer form repeats the marker for each call, and may write the call's id as `[CALL_ID]` between the two.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from typing import ClassVar

from headrace.processing.tools.call import read_call
from headrace.processing.tools.reader import Malformed, Reader, Steps

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[-.\w]*")
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9


class MistralParser:
    """Ids are nine letters and digits: the models' chat templates refuse all others when they come back."""

    markers: ClassVar[tuple[str, ...]] = (START, CALL_ID, ARGS)

    def __init__(self, tool_names: Collection[str]) -> None:
        reader = Reader(self._read, mistral_id)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        while (yield from reader.content_until(START)):
            try:
                if (yield from reader.peek_past_space()) == "[":
                    yield from self._array(reader)
                else:
                    yield from self._named(reader)
            except Malformed:
                reader.reject()

    def _array(self, reader: Reader) -> Steps[None]:
        yield from reader.expect("[")
        while True:
            yield from read_call(reader)
            yield from reader.space()
            if not (yield from reader.take(",")):
                break
        if (yield from reader.take("]")):
            reader.accept()
        else:
            reader.reject()

    def _named(self, reader: Reader) -> Steps[None]:
        name, id = (yield from reader.match(_NAME)), ""
        if (yield from reader.take(CALL_ID)):
            id = yield from reader.match(_NAME)
        yield from reader.take(ARGS)
        if not name or (yield from reader.peek_past_space()) != "{":
            raise Malformed
        reader.open_call(name, id if len(id) == _ID_LENGTH and id.isascii() and id.isalnum() else None)
        yield from reader.json_arguments()


def mistral_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
