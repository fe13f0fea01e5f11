"""Structured output over HTTP, without an engine: what reaches it, and what is refused before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.testing.front_end import FrontEnd
from headrace.types import GrammarSpec

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_both_routes_take_the_fields(front_end: FrontEnd, route: str) -> None:
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
        {"guided_json": {"type": "null"}},
        {"structured_outputs": {"json": {"type": "null"}}},
    ):
        assert (await getattr(front_end, route)(**fields)).status_code == 200
        assert front_end.submit.params.grammar == GrammarSpec("json_schema", '{"type":"null"}')
    assert (await getattr(front_end, route)()).status_code == 200
    assert front_end.submit.params.grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}},
            "response_format.json_schema.schema",
            "objct",
        ),
        ({"structured_outputs": {"grammar": "begin: x"}}, "structured_outputs.grammar", "start"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "guided_json and guided_choice"),
    ],
)
async def test_bad_ones_are_400_with_their_field(
    front_end: FrontEnd, route: str, stream: bool, fields: dict[str, Any], param: str, said: str
) -> None:
    response = await getattr(front_end, route)(stream=stream, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert not front_end.client.streams
    assert (await front_end.complete()).status_code == 200


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls_reach_the_engine_as_a_grammar(make: Callable[..., FrontEnd], choice: Any) -> None:
    front_end = make(parsing={"tool_parser": "hermes"})
    assert (await front_end.chat(tools=TOOLS, tool_choice=choice)).status_code == 200
    grammar = front_end.submit.params.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert "<tool_call>" in grammar.text


async def test_forced_calls_and_a_form_are_a_conflict(make: Callable[..., FrontEnd]) -> None:
    front_end = make(parsing={"tool_parser": "hermes"})
    fields = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    error = (await front_end.chat(**fields)).json()["error"]
    assert error["code"] == "invalid_value"
    assert "response_format and tool_choice" in error["message"]


async def test_a_tool_s_schema_that_cannot_be_held_is_400(make: Callable[..., FrontEnd]) -> None:
    front_end = make(parsing={"tool_parser": "hermes"})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    response = await front_end.chat(tools=tools, tool_choice="required")
    assert response.status_code == 400
    assert "not" in json.dumps(response.json())
    assert (await front_end.chat(tools=tools)).status_code == 200


@pytest.mark.parametrize(("parser", "is_wrapped"), [("think", True), ("deepseek_r1", True), ("none", False)])
async def test_thoughts_may_come_before_the_form(make: Callable[..., FrontEnd], parser: str, is_wrapped: bool) -> None:
    front_end = make(parsing={"reasoning_parser": parser})
    assert (await front_end.chat(guided_regex="[0-9]+")).status_code == 200
    grammar = front_end.submit.params.grammar
    assert grammar is not None
    assert (grammar.kind == "llguidance") == is_wrapped
    assert ("</think>" in grammar.text) == is_wrapped
    assert (await front_end.complete(guided_regex="[0-9]+")).status_code == 200
    assert front_end.submit.params.grammar == GrammarSpec("regex", "[0-9]+")
