"""Twenty small JSON schemas for tests of structured output, bounded so that outputs are short whatever a model says."""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "maxLength": 8}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _int(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "small_integer": {"type": "integer", "minimum": -12, "maximum": 345},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "short_string": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
    "date": {"type": "string", "format": "date"},
    "enum": {"enum": ["red", "green", 3, None, {"deep": [1]}]},
    "const": {"const": {"a": "b\n\"'\\", "ü": "😀"}},
    "person": _object(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": NAME, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": _object(inner=_object(x={"type": "boolean"}, y=_object(z={"enum": ["u", "v"]}))),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}],
        "items": False,
        "minItems": 2,
    },
    "any_of": {"anyOf": [{"type": "boolean"}, _object(kind={"const": "x"}), {"type": "string", "maxLength": 3}]},
    "one_of": {"oneOf": [_object(kind={"const": "cat"}, lives=_int(9)), _object(kind={"const": "dog"}, good=_int(1))]},
    "refs": {
        "$defs": {"point": _object(x=_int(99), y=_int(99))},
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "all_of": {"allOf": [_object(a={"type": "boolean"}, b=_int(5)), {"required": ["a"]}]},
    "type_list": {"type": ["boolean", "null"]},
    "array_of_objects": {"type": "array", "items": _object(id=_int(999), tag=NAME), "maxItems": 2},
}
