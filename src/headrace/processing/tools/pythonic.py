"""Calls as a Python list: `[look_up(city="Oslo", days=3), now()]`, as Llama 3.2 and 4 write them.

Nothing but the list marks a call (Llama 4 may put `<|python_start|>` before it), so it must be all of the answer and
its functions those of the request. Arguments become JSON one by one, each when it is whole.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any, ClassVar

from headrace.processing.tools.reader import Malformed, Reader, Steps

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[.\w]*")
_KEYWORD = re.compile(r"\w*")
_PLAIN = re.compile(r"[^\[\](){}'\",\\]*")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models write too
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser:
    """A list that breaks off keeps the calls that it had; the rest of it is content."""

    markers: ClassVar[tuple[str, ...]] = (START, END)

    def __init__(self, tool_names: Collection[str]) -> None:
        self._tool_names = tool_names
        reader = Reader(self._read)
        self.feed, self.finish = reader.feed, reader.finish

    def _read(self, reader: Reader) -> Steps[None]:
        try:
            yield from reader.space()
            yield from reader.take(START)
            yield from reader.space()
            yield from reader.expect("[")
            while True:
                yield from self._call(reader)
                yield from reader.space()
                if not (yield from reader.take(",")):
                    break
            yield from reader.expect("]")
            yield from reader.space()
            yield from reader.take_end(END)
            reader.accept()
        except Malformed:
            reader.reject()

    def _call(self, reader: Reader) -> Steps[None]:
        yield from reader.space()
        name = yield from reader.match(_NAME)
        if name not in self._tool_names:
            raise Malformed
        yield from reader.expect("(")
        opened, keys = "{", set[str]()
        while (yield from reader.peek_past_space()) != ")":
            key = yield from reader.match(_KEYWORD)
            if not key.isidentifier() or key in keys:
                raise Malformed
            yield from reader.space()
            yield from reader.expect("=")
            argument = f"{json.dumps(key, ensure_ascii=False)}: {_to_json((yield from _expression(reader)))}"
            if not keys:
                reader.open_call(name)
            reader.add_arguments(opened + argument)
            reader.accept()
            opened = ", "
            keys.add(key)
            yield from reader.take(",")
        yield from reader.expect(")")
        if not keys:
            reader.open_call(name)
        reader.add_arguments("}" if keys else "{}")
        reader.accept()


def _expression(reader: Reader) -> Steps[str]:
    """The source of an argument: up to the comma or bracket that ends it."""
    parts: list[str] = []
    closers: list[str] = []
    while True:
        parts.append((yield from reader.match(_PLAIN)))
        char = yield from reader.peek()
        if not char or (char in ")]}" and closers and closers[-1] != char):
            raise Malformed
        if not closers and char in ",)":
            return "".join(parts)
        yield from reader.expect(char)
        parts.append(char)
        if char in _QUOTED:
            parts.append((yield from _quoted(reader, char)))
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif char in ")]}":
            if not closers:
                raise Malformed
            closers.pop()
        elif char == "\\":
            raise Malformed


def _quoted(reader: Reader, quote: str) -> Steps[str]:
    """The rest of a string, its end included."""
    parts: list[str] = []
    while True:
        parts.append((yield from reader.match(_QUOTED[quote])))
        char = yield from reader.peek()
        if not char:
            raise Malformed
        yield from reader.expect(char)
        parts.append(char)
        if char == quote:
            return "".join(parts)
        escaped = yield from reader.peek()
        if not escaped:
            raise Malformed
        yield from reader.expect(escaped)
        parts.append(escaped)


def _to_json(source: str) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):  # "\d" in a string
            tree = ast.parse(source.strip(), mode="eval")
        text = json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise Malformed from None
    return text


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for everything else."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
