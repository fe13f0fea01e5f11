"""Tool calls that a request insists on: `tool_choice: required` or a function by name, as a grammar.

Called by the chat route. The text that the grammar lets through is what the format's parser reads as calls; where a
marker is a special token, the token itself is meant (`lark.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal, shown
from headrace.processing.tools import hermes, llama3, mistral
from headrace.processing.tools.base import ToolParserType
from headrace.types import GrammarSpec

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


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
        raise InvalidRequest(
            "tool_choice must be none or auto: the served model's tool calls are of a form that cannot be enforced.",
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
    return {"before": [], "calls": [[*start, *call, *end] for call in calls], "more": "\n", "after": []}


def _llama3(functions: Mapping[str, Any]) -> dict[str, Any]:
    calls = [[_head(name, "parameters"), {"schema": schema}, "}"] for name, schema in functions.items()]
    return {"before": [], "calls": calls, "more": "; ", "after": []}


def _mistral(functions: Mapping[str, Any]) -> dict[str, Any]:
    calls = [[_head(name, "arguments"), {"schema": schema}, "}"] for name, schema in functions.items()]
    return {"before": [{"marker": mistral.START}, "["], "calls": calls, "more": ", ", "after": ["]"]}


def _head(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


_FORMS: dict[ToolParserType | None, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    hermes.HermesParser: _hermes,
    llama3.Llama3Parser: _llama3,
    mistral.MistralParser: _mistral,
}
