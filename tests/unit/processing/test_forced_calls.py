"""tool_choice: required and named functions. What the grammar lets through, the format's parser reads as calls."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest

from headrace.errors import InvalidRequest
from headrace.grammar import GrammarCompiler
from headrace.processing.lark import to_engine_form
from headrace.processing.tools import ToolParserType, tool_parsers
from headrace.processing.tools.forced import tool_choice_grammar
from headrace.processing.vocabulary import vocabulary_of
from headrace.testing.bytes import byte_tokenizer
from headrace.types import GrammarSpec

TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(lambda: vocabulary_of(TOKENIZER), 260, TOKENIZER.eos_token_ids)
FORMS = ["hermes", "ernie_x1", "llama3_json", "mistral", "pythonic", "deepseek_v3", "qwen3_coder", "glm45"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "wéather",
            "parameters": {
                "$defs": {"unit": {"enum": ["C", "F"]}},
                "type": "object",
                "properties": {
                    "unit": {"$ref": "#/$defs/unit"},
                    "days": {"type": "integer", "maximum": 9, "minimum": 0},
                },
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS: dict[str, Any] = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
NAMED = {"type": "function", "function": {"name": "wéather"}}


def say(spec: GrammarSpec, seed: int, most: int = 400) -> str:
    """A text at random that the grammar lets through; it ends as soon as it may."""
    rng = np.random.default_rng(seed)
    matcher = COMPILER.get(to_engine_form(spec, lambda _: None)).matcher()
    output: list[int] = []
    while len(output) < most:
        mask = matcher.mask()
        assert mask is not None
        allowed = np.flatnonzero(mask == 0)
        if allowed[-1] >= 256:
            return bytes(output).decode()
        output.append(int(rng.choice(allowed)))
        matcher.accept(output[-1])
    raise AssertionError(bytes(output))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_what_comes_is_read_as_a_call(name: str, choice: Any) -> None:
    spec = tool_choice_grammar(TOOLS, choice, tool_parsers()[name], is_parallel=False)
    assert spec is not None
    called = set()
    for seed in range(8):
        parser = tool_parsers()[name](SCHEMAS)
        text = say(spec, seed)
        outputs = [parser.feed(text), parser.finish()]
        assert not "".join(output.content for output in outputs).strip()
        calls = [call for output in outputs for call in output.calls]
        assert {call.index for call in calls} == {0}
        arguments = json.loads("".join(call.arguments for call in calls))
        called.add(calls[0].name)
        if calls[0].name == "stop":
            assert arguments == {}
        else:
            assert arguments["unit"] in "CF"
            assert 0 <= arguments["days"] <= 9
    assert called == ({"wéather"} if choice is NAMED else {"wéather", "stop"})


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("choice", "is_parallel", "may_follow"),
    [("required", True, True), ("required", False, False), (NAMED, True, False)],
)
def test_more_calls_follow_only_where_they_may(name: str, choice: Any, is_parallel: bool, may_follow: bool) -> None:
    spec = tool_choice_grammar(TOOLS, choice, tool_parsers()[name], is_parallel=is_parallel)
    assert spec is not None
    text = say(spec, 1, most=3000)
    end = "<｜tool▁calls▁end｜>" if name == "deepseek_v3" else "]"
    matcher = COMPILER.get(to_engine_form(spec, lambda _: None)).matcher(text.removesuffix(end).encode())
    mask = matcher.mask()
    assert mask is not None
    others = {int(n) for n in np.flatnonzero(mask == 0)} - set(TOKENIZER.eos_token_ids) - {ord("]")}
    if name == "deepseek_v3":  # its end and its calls begin alike
        assert (10 in others) == may_follow
    else:
        assert bool(others) == may_follow


def test_a_marker_that_is_a_special_token_is_meant_as_that_token() -> None:
    spec = tool_choice_grammar(TOOLS, "required", tool_parsers()["mistral"])
    assert spec is not None
    assert to_engine_form(spec, lambda text: 7 if text == "[TOOL_CALLS]" else None).text.count("<[7]>") == 1


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_where_the_model_may_choose_nothing_is_forced(choice: Any) -> None:
    assert tool_choice_grammar(TOOLS, choice, None) is None


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "required", "tool_choice"),
        (TOOLS, "always", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        ([{"type": "function"}], "required", "tools[0].function"),
        ([{"function": {"name": "f", "parameters": 1}}], "required", "tools[0].function.parameters"),
    ],
)
def test_what_cannot_be_forced(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_choice_grammar(tools, choice, tool_parsers()["hermes"])
    assert caught.value.param == param


def test_forms_that_cannot_be_enforced_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        tool_choice_grammar(TOOLS, "required", cast(ToolParserType, type("FromAPlugin", (), {})))
    with pytest.raises(InvalidRequest, match="no tool calls"):
        tool_choice_grammar(TOOLS, "required", None)


def tool(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("form", ["pythonic", "qwen3_coder", "glm45"])
def test_arguments_come_or_are_left_out_as_the_schema_allows(form: str) -> None:
    properties = {"a": {"type": "boolean"}, "b": {"enum": ["x\n\"'\\", "", None]}, "c": {"type": "boolean"}}
    found = set()
    for required in (["b"], []):
        parameters = {"type": "object", "properties": properties, "required": required}
        spec = tool_choice_grammar([tool("f", parameters)], "required", tool_parsers()[form], is_parallel=False)
        assert spec is not None
        for seed in range(120):
            parser = tool_parsers()[form]({"f": parameters})
            [*calls] = [*parser.feed(say(spec, seed)).calls, *parser.finish().calls]
            arguments = json.loads("".join(call.arguments for call in calls))
            assert set(required) <= set(arguments) <= set(properties)
            assert arguments.get("b") in properties["b"]["enum"]
            found.add((*required, ":", *arguments))
    assert len(found) == 4 + 8


@pytest.mark.parametrize(
    ("form", "name", "parameters"),
    [
        ("pythonic", "get-it", {}),
        ("pythonic", "f", {"properties": {"a-b": {}}}),
        ("pythonic", "f", {"anyOf": [{}]}),
        ("glm45", "f", {"$ref": "#/$defs/x"}),
        ("glm45", "a<b", {}),
        ("qwen3_coder", "f", {"properties": {"a>b": {}}}),
        ("qwen3_coder", " f", {}),
    ],
)
def test_what_the_format_has_no_words_for_cannot_be_forced(form: str, name: str, parameters: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be forced") as caught:
        tool_choice_grammar([tool(name, parameters or {"type": "object"})], "required", tool_parsers()[form])
    assert caught.value.param == "tools"


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
def test_a_string_between_tags_is_written_as_it_is(form: str, is_special: bool) -> None:
    """Up to its end tag, whatever stands in it; other parameters are JSON, and choices are choices."""
    properties = {
        "code": {"type": "string"},
        "lines": {"type": ["array", "null"], "items": {"type": "integer"}},
        "mode": {"type": "string", "enum": ["r", "rw"]},
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    spec = tool_choice_grammar([tool("run", parameters)], "required", tool_parsers()[form], is_parallel=False)
    assert spec is not None
    values = {"code": 'if a < b:\n    say("</parameter_>")\n', "lines": "[1, 2]", "mode": "rw"}
    if form == "qwen3_coder":
        tags = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
        text = f"<tool_call>\n<function=run>\n{''.join(tags)}</function>\n</tool_call>"
        markers = ["<tool_call>", "</tool_call>"]
    else:
        tags = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
        text = f"<tool_call>run\n{''.join(tags)}</tool_call>"
        markers = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    special = {marker: 0x11 + index for index, marker in enumerate(markers)} if is_special else {}
    form_of_engine = to_engine_form(spec, special.get)
    assert form_of_engine.text.count("<[") >= len(special)
    if not is_special:  # the byte tokenizer has no special tokens
        matcher = COMPILER.get(form_of_engine).matcher()
        for byte in text.encode():
            mask = matcher.mask()
            assert mask is not None
            assert mask[byte] == 0, text
            matcher.accept(byte)
        mask = matcher.mask()
        assert mask is not None
        assert np.flatnonzero(mask == 0)[-1] >= 256, "it may end"
    parser = tool_parsers()[form]({"run": parameters})
    calls = [*parser.feed(text).calls, *parser.finish().calls]
    arguments = json.loads("".join(call.arguments for call in calls))
    assert arguments == {**values, "lines": [1, 2]}
