"""Tool calls that a request insists on: `tool_choice: required` or a function by name, as a grammar.

Called by the chat route. The text that the grammar lets through is what the format's parser reads as calls; where a
marker is a special token, the token itself is meant (`lark.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal, shown
from headrace.processing.tools import deepseek_v3, hermes, llama3, mistral, pythonic
from headrace.processing.tools.base import ToolParserType
from headrace.types import GrammarSpec

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
UNSPLIT = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties")
"""Keywords that say something of all arguments together."""


def tool_choice_grammar(
    tools: Sequence[Any] | None, choice: Any, parser: ToolParserType | None, *, is_parallel: bool = True
) -> GrammarSpec | None:
    """What the reply must be; None where the model may choose. Raises InvalidRequest. Calls of a function by name are
    exactly one, `required` ones one or more, unless `is_parallel` is off."""
    if choice is None or choice in ("none", "auto"):
        return None
    functions = _functions(tools)
    if choice != "required":
        name = _chosen(choice)
        functions = {each: schema for each, schema in functions.items() if each == name}
        if not functions:
            raise InvalidRequest(f"tool_choice names {shown(name)}, which is not among the tools.", param="tool_choice")
    elif not functions:
        raise InvalidRequest("tool_choice required needs tools.", param="tool_choice")
    form = _FORMS.get(parser)
    if form is None:
        why = "tool calls are of a form that cannot be enforced" if parser else "chat template has no tool calls"
        raise InvalidRequest(
            f"tool_choice must be none or auto: the served model's {why} (see --tool-parser).",
            param="tool_choice",
            code="unsupported_field",
        )
    calls = form(functions)
    calls["more"] = calls["more"] if is_parallel and choice == "required" else None
    return GrammarSpec("tool_calls", json.dumps(calls, ensure_ascii=False))


def _functions(tools: Sequence[Any] | None) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{index}] must have a function with a name.", param=f"tools[{index}].function")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise refusal(f"tools[{index}].function.parameters", schema, "a JSON schema")
        functions[name] = schema or NO_PARAMETERS
    return functions


def _chosen(choice: Any) -> Any:
    """The name, as OpenAI's `{type, function: {name}}` has it."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or choice.get("type") != "function":
        raise refusal("tool_choice", choice, "none, auto, required or {type: function, function: {name}}")
    return function.get("name")


def _hermes(functions: Mapping[str, Any]) -> dict[str, Any]:
    calls = [[_head(name, "arguments"), {"schema": schema}, "}"] for name, schema in functions.items()]
    start, end = [{"marker": hermes.START}, "\n"], ["\n", {"marker": hermes.END}]
    return {"before": [], "calls": [[*start, *call, *end] for call in calls], "more": ["\n"], "after": []}


def _llama3(functions: Mapping[str, Any]) -> dict[str, Any]:
    calls = [[_head(name, "parameters"), {"schema": schema}, "}"] for name, schema in functions.items()]
    return {"before": [], "calls": calls, "more": ["; "], "after": []}


def _mistral(functions: Mapping[str, Any]) -> dict[str, Any]:
    calls = [[_head(name, "arguments"), {"schema": schema}, "}"] for name, schema in functions.items()]
    return {"before": [{"marker": mistral.START}, "["], "calls": calls, "more": [", "], "after": ["]"]}


def _deepseek_v3(functions: Mapping[str, Any]) -> dict[str, Any]:
    """In V3's form and in V3.1's: the model knows which is its own."""
    begin, middle, end = ({"marker": text} for text in (deepseek_v3.CALL, deepseek_v3.SEPARATOR, deepseek_v3.CALL_END))
    calls: list[list[Any]] = []
    for name, schema in functions.items():
        calls.append([begin, "function", middle, f"{name}\n```json\n", {"schema": schema}, "\n```", end])
        calls.append([begin, name, middle, {"schema": schema}, end])
    before, after = [{"marker": deepseek_v3.CALLS}], [{"marker": deepseek_v3.CALLS_END}]
    return {"before": before, "calls": calls, "more": [{"maybe": "\n"}], "after": after}


def _pythonic(functions: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument is JSON, which is Python as far as the parser is concerned."""
    calls: list[list[Any]] = []
    rules: dict[str, Any] = {}
    for number, (name, schema) in enumerate(functions.items()):
        own = _keyword_rules(f"f{number}", name, schema)
        rules |= own
        calls.append([f"{name}(", *([{"rule": next(iter(own))}] if own else []), ")"])
    return {"before": ["["], "calls": calls, "more": [", "], "after": ["]"], "rules": rules}


def _keyword_rules(prefix: str, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """`a=1, b="x"` as rules, the first of which stands for all. Of each argument there is a rule for where none has
    come before it, and one for where a comma is due."""
    properties = schema.get("properties") or {}
    keys = list(properties)
    broken = [key for key in UNSPLIT if key in schema]
    if broken or not re.fullmatch(r"[.\w]+", name) or not all(key.isidentifier() for key in keys):
        raise InvalidRequest(
            f"Calls of {shown(name)} cannot be forced: the served model writes them in Python, so a function and its "
            f"parameters must have Python's names, and parameters no {', '.join(UNSPLIT)} beside properties.",
            param="tools",
            code="unsupported_field",
        )
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = set(schema.get("required") or ())
    rules: dict[str, Any] = {}
    for index, key in enumerate(keys):
        own = properties[key]
        value = {"schema": {**own, **shared} if isinstance(own, Mapping) else own}
        is_last = index == len(keys) - 1
        is_optional = key not in required
        for label, comma in (("a", ""), ("b", ", ")):
            later = [] if is_last else [{"rule": f"{prefix}_b{index + 1}"}]
            either = [[f"{comma}{key}=", value, *later]]
            if is_optional and not is_last:
                either.append([{"rule": f"{prefix}_{label}{index + 1}"}])
            rules[f"{prefix}_{label}{index}"] = {"either": either, "is_optional": is_optional and is_last}
    return rules


def _head(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


_FORMS: dict[ToolParserType | None, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    hermes.HermesParser: _hermes,
    llama3.Llama3Parser: _llama3,
    mistral.MistralParser: _mistral,
    pythonic.PythonicParser: _pythonic,
    deepseek_v3.DeepSeekV3Parser: _deepseek_v3,
}
