"""Tool calls that a request insists on: `tool_choice: required` or a function by name, as a grammar.

Called by the chat route. The text that the grammar lets through is what the format's parser reads as calls; where a
marker is a special token, the token itself is meant (`lark.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal, shown
from headrace.processing.tools import deepseek_v3, glm45, hermes, llama3, mistral, pythonic, qwen3_coder
from headrace.processing.tools.base import ToolParserType
from headrace.processing.tools.tagged import types_of
from headrace.types import GrammarSpec

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
UNSPLIT = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties")
"""Keywords that say something of all arguments together."""
_TAG_NAME = r"[^<>\s](?:[^<>\n]*[^<>\s])?"
"""What can stand in a tag, or between two."""


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

    def argument(key: str, schema: Any) -> list[Any]:
        return [f"{key}=", {"schema": schema}]

    arguments = _one_by_one(functions, argument, r"[.\w]+", str.isidentifier, between=", ")
    calls = [[f"{name}(", *own, ")"] for name, own in zip(functions, arguments.firsts, strict=True)]
    return {"before": ["["], "calls": calls, "more": [", "], "after": ["]"], "rules": arguments.rules}


def _qwen3_coder(functions: Mapping[str, Any]) -> dict[str, Any]:
    start, end = {"marker": qwen3_coder.START}, {"marker": qwen3_coder.END}

    def argument(key: str, schema: Any) -> list[Any]:
        value = _plain(schema, "\n", qwen3_coder.PARAMETER_END)
        return [f"{qwen3_coder.PARAMETER}{key}>\n", *value, "\n"]

    arguments = _one_by_one(functions, argument, _TAG_NAME, _is_tag_name)
    calls = [
        [start, f"\n{qwen3_coder.FUNCTION}{name}>\n", *own, f"{qwen3_coder.FUNCTION_END}\n", end]
        for name, own in zip(functions, arguments.firsts, strict=True)
    ]
    return {"before": [], "calls": calls, "more": ["\n"], "after": [], "rules": arguments.rules}


def _glm45(functions: Mapping[str, Any]) -> dict[str, Any]:
    start, end = {"marker": glm45.START}, {"marker": glm45.END}
    key_start, key_end, value_start = ({"marker": text} for text in (glm45.KEY, glm45.KEY_END, glm45.VALUE))

    def argument(key: str, schema: Any) -> list[Any]:
        return [key_start, key, key_end, "\n", value_start, *_plain(schema, "", glm45.VALUE_END), "\n"]

    arguments = _one_by_one(functions, argument, _TAG_NAME, _is_tag_name)
    calls = [[start, f"{name}\n", *own, end] for name, own in zip(functions, arguments.firsts, strict=True)]
    return {"before": [], "calls": calls, "more": ["\n"], "after": [], "rules": arguments.rules}


def _plain(schema: Any, border: str, end: str) -> list[Any]:
    """A value and its end tag, as `tagged.py` reads them: what may be a string as it is, all else as JSON."""
    types = set(types_of(schema))
    if "string" not in types:
        return [{"schema": schema}, border, {"marker": end}]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return [{"text_until": end, "border": border}]
    # Of choices that are no strings the parser tells null alone from a string.
    texts = ["null" if value is None else value for value in values if value is None or isinstance(value, str)]
    return [{"one_of": texts}, border, {"marker": end}]


@dataclass(frozen=True)
class _Arguments:
    """Those of all functions, as rules."""

    rules: dict[str, Any]
    firsts: list[list[Any]]  # by function, what stands for all of its arguments; nothing where it has none


def _one_by_one(
    functions: Mapping[str, Any],
    argument: Callable[[str, Any], list[Any]],
    name_pattern: str,
    is_key: Callable[[str], bool],
    *,
    between: str = "",
) -> _Arguments:
    """Arguments in the order of `properties`, each as its own rule, as formats need it that write no JSON object. With
    something `between` them there is a rule for where none has come before, and one for where it is due."""
    labels = {"a": "", "b": between} if between else {"a": ""}
    rules: dict[str, Any] = {}
    firsts: list[list[Any]] = []
    for number, (name, schema) in enumerate(functions.items()):
        properties = schema.get("properties") or {}
        broken = [key for key in UNSPLIT if key in schema]
        if broken or not re.fullmatch(name_pattern, name) or not all(map(is_key, properties)):
            raise InvalidRequest(
                f"Calls of {shown(name)} cannot be forced: the served model writes arguments one by one, so a function "
                "and its parameters must have names that its format can write (Python's, where it writes Python), and "
                f"parameters no {', '.join(UNSPLIT)} beside properties.",
                param="tools",
                code="unsupported_field",
            )
        firsts.append([{"rule": f"f{number}_a0"}] if properties else [])
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = set(schema.get("required") or ())
        for index, (key, own) in enumerate(properties.items()):
            value = argument(key, {**own, **shared} if isinstance(own, Mapping) else own)
            is_last, is_optional = index == len(properties) - 1, key not in required
            for label, due in labels.items():
                later = [] if is_last else [{"rule": f"f{number}_{list(labels)[-1]}{index + 1}"}]
                either = [[due, *value, *later]]
                if is_optional and not is_last:
                    either.append([{"rule": f"f{number}_{label}{index + 1}"}])
                rules[f"f{number}_{label}{index}"] = {"either": either, "is_optional": is_optional and is_last}
    return _Arguments(rules, firsts)


def _is_tag_name(key: str) -> bool:
    return re.fullmatch(_TAG_NAME, key) is not None


def _head(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


_FORMS: dict[ToolParserType | None, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    hermes.HermesParser: _hermes,
    llama3.Llama3Parser: _llama3,
    mistral.MistralParser: _mistral,
    pythonic.PythonicParser: _pythonic,
    deepseek_v3.DeepSeekV3Parser: _deepseek_v3,
    qwen3_coder.Qwen3CoderParser: _qwen3_coder,
    glm45.Glm45Parser: _glm45,
}
