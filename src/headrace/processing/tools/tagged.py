"""Reads the arguments of calls that are written between tags, one by one and as plain text.

Used by the formats of Qwen3-Coder and GLM-4.5. What a text means depends on the function's schema: a parameter that may
be a string is one, and is passed on while it is written; any other is JSON if it can be read as such.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headrace.processing.tools.json_scanner import JsonScanner
from headrace.processing.tools.reader import Reader, Steps

_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models write too


class Arguments:
    """The arguments of one call, which `begin` opens."""

    def __init__(self, reader: Reader, name: str, tools: Collection[str]) -> None:
        self._reader = reader
        self._name = name
        schema = tools.get(name) if isinstance(tools, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._keys: set[str] = set()

    def is_new(self, key: str) -> bool:
        return bool(key) and key not in self._keys

    def read(self, key: str, end: str, border: str = "") -> Steps[None]:
        """Reads a value up to its end tag. `border`: what the format writes around it. Raises Malformed."""
        reader = self._reader
        self._open(key)
        yield from reader.take(border)
        types = set(types_of(self._properties.get(key)))
        if "string" in types and "null" not in types:
            yield from reader.string_until(end, border)
            return
        text = yield from reader.text_until(end, border)
        is_string = "string" in types and text.strip() != "null"
        reader.add_arguments(json.dumps(text, ensure_ascii=False) if is_string else _json_of(text))
        reader.accept()

    def close(self) -> None:
        if not self._keys:
            self._reader.open_call(self._name)
        self._reader.add_arguments("}" if self._keys else "{}")
        self._reader.accept()

    def _open(self, key: str) -> None:
        if not self._keys:
            self._reader.open_call(self._name)
        self._reader.add_arguments(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._reader.accept()
        self._keys.add(key)


def types_of(schema: Any) -> Iterator[str]:
    """The JSON types that a schema speaks of."""
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type")
    yield from [types] if isinstance(types, str) else [each for each in types or () if isinstance(each, str)]
    if types is None and isinstance(values := schema.get("enum"), list):
        yield from ("string" for value in values if isinstance(value, str))
        yield from ("null" for value in values if value is None)
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            yield from types_of(branch)


def _json_of(text: str) -> str:
    stripped = text.strip()
    scanner = JsonScanner()
    end = scanner.scan(stripped, 0, is_last=True)
    if scanner.is_done and end == len(stripped):
        return stripped
    return _WORDS.get(stripped) or json.dumps(text, ensure_ascii=False)
