"""Reads a call that is written as a JSON object: `{"name": "f", "arguments": {...}}`.

Used by the formats that share this shape. Keys may come in any order; others than these two are skipped. A call is
opened when its name is known and its arguments have begun, so that what turns out to be no call stays content.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from headrace.processing.tools.reader import Malformed, Reader, Steps

ARGUMENTS = ("arguments", "parameters")


def read_call(reader: Reader, *, known: Collection[str] | None = None) -> Steps[None]:
    """Reads one object and passes it on. Raises Malformed. `known`: only a call of one of these is one, and the object
    must begin like a call."""
    reader.begin()
    name: str | None = None
    arguments: str | None = None
    is_first = True
    yield from reader.space()
    yield from reader.expect("{")
    while True:
        yield from reader.space()
        key = yield from _string(reader)
        if known is not None and is_first and key not in ("name", "type", "id"):
            raise Malformed
        is_first = False
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key == "name" and name is None:
            name = yield from _string(reader)
            if not name or (known is not None and name not in known):
                raise Malformed
        elif key in ARGUMENTS and not reader.is_in_call and arguments is None:
            if name is not None and (yield from reader.peek()) == "{":
                reader.open_call(name)
                yield from reader.json_arguments()
            else:
                arguments = _object_text((yield from reader.json_value()))
        else:
            yield from reader.json_value()
        yield from reader.space()
        if not (yield from reader.take(",")):
            break
    yield from reader.expect("}")
    if not reader.is_in_call:
        if name is None:
            raise Malformed
        reader.open_call(name)
        reader.add_arguments("{}" if arguments is None else arguments)
    reader.accept()


def _string(reader: Reader) -> Steps[str]:
    if (yield from reader.peek()) != '"':
        raise Malformed
    return _decoded((yield from reader.json_value()))


def _decoded(text: str) -> str:
    """What a JSON string says; half a surrogate pair is no text."""
    decoded: str = json.loads(text)
    if not decoded.isascii() and any("\ud800" <= char <= "\udfff" for char in decoded):
        raise Malformed
    return decoded


def _object_text(text: str) -> str:
    """Arguments as the text of an object: some models write that text as a string, or null for none."""
    if text == "null":
        return "{}"
    if text.startswith("{"):
        return text
    try:
        decoded = _decoded(text) if text.startswith('"') else ""
        if isinstance(json.loads(decoded), dict):
            return decoded
    except (ValueError, RecursionError):
        pass
    raise Malformed
