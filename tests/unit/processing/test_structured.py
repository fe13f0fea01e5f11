"""Fields of a request -> one spec, and what is wrong with them -> 400 that names the field."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.config.options import GrammarConfig
from headrace.errors import InvalidRequest
from headrace.grammar import GrammarCompiler
from headrace.processing.lark import after_thoughts, to_engine_form
from headrace.processing.structured import GrammarChecker, grammar_of
from headrace.processing.vocabulary import vocabulary_of
from headrace.testing.bytes import byte_tokenizer
from headrace.types import GrammarSpec

OBJECT = '{"type":"object"}'
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "spec", "path"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_schema", OBJECT), "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}}},
            GrammarSpec("json_schema", "{}"),
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"b": 1, "a": 2}}, GrammarSpec("json_schema", '{"b":1,"a":2}'), "guided_json"),
        ({"guided_json": '{ "type" : "object" }'}, GrammarSpec("json_schema", OBJECT), "guided_json"),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+"), "guided_regex"),
        ({"guided_choice": ["ä", "b"]}, GrammarSpec("choice", '["ä","b"]'), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"'), "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"'}, GrammarSpec("gbnf", 'root ::= "a"'), "guided_grammar"),
        ({"structured_outputs": {"json": {}}}, GrammarSpec("json_schema", "{}"), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "json": None}}, GrammarSpec("regex", "a"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            GrammarSpec(
                "json_schema",
                '{"type":"object","x-guidance":{"whitespace_flexible":false,"whitespace_pattern":null}}',
            ),
            "structured_outputs.json_object",
        ),
    ],
)
def test_every_field_becomes_a_spec(fields: dict[str, Any], spec: GrammarSpec, path: str) -> None:
    assert grammar_of(fields) == (spec, path)


@pytest.mark.parametrize("value", [TAG, json.dumps(TAG)])
def test_structural_tags_come_as_object_or_text(value: Any) -> None:
    found = grammar_of({"structural_tag": value})
    assert found is not None
    assert json.loads(found[0].text) == TAG
    found = grammar_of({"response_format": {"type": "structural_tag", **TAG}})
    assert found is not None
    assert found[0].kind == "structural_tag"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_nothing_asked(fields: dict[str, Any]) -> None:
    assert grammar_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, ("guided_json", "guided_regex")),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, ("response_format", "guided_choice")),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            ("structured_outputs.regex", "structured_outputs.choice"),
        ),
        ({"guided_regex": "a", "structured_outputs": {"json": {}}}, ("guided_regex", "structured_outputs.json")),
    ],
)
def test_two_of_them_are_a_conflict_that_names_both(fields: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(fields)
    assert all(name in caught.value.message for name in names)
    assert caught.value.param == names[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": []}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structural_tag": "["}, "structural_tag"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 1}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_wrong_shapes(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(fields)
    assert caught.value.param == param


# ------------------------------------------------------------------------------------------------------ the checker


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(byte_tokenizer(), GrammarConfig(max_grammar_bytes=2000))
    yield checker
    checker.close()


async def check(checker: GrammarChecker, kind: str, text: str) -> GrammarSpec:
    return await checker.check(GrammarSpec(kind, text), "the_field", 300)


async def test_what_the_engine_gets_is_of_three_kinds(checker: GrammarChecker) -> None:
    assert await check(checker, "regex", "a+") == GrammarSpec("regex", "a+")
    for kind, text in (
        ("choice", '["a", "b\\""]'),
        ("gbnf", 'root ::= "a" [b-c]'),
        ("structural_tag", json.dumps(TAG)),
    ):
        spec = await check(checker, kind, text)
        assert spec.kind == "lark"
        assert await check(checker, *spec_parts(spec)) == spec


def spec_parts(spec: GrammarSpec) -> tuple[str, str]:
    return spec.kind, spec.text


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ("json_schema", '{"type":"string","format":"weird"}', "weird"),
        ("gbnf", "root ::= nowhere", "nowhere"),
        ("gbnf", "root ::= [", "GBNF"),
        ("structural_tag", '{"structures":[],"triggers":["a"]}', "structures"),
        ("structural_tag", '{"structures":[{"begin":"x"}],"triggers":["a"]}', "none of the triggers"),
        ("structural_tag", '{"format":{}}', "structures and triggers"),
        ("regex", "a" * 2001, "2000 bytes"),
        ("regex", "\ud800", "surrogate"),
        ("x", "a", "unknown"),
    ],
)
async def test_a_bad_grammar_is_refused_with_its_field(
    checker: GrammarChecker, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await check(checker, kind, text)
    assert caught.value.param == "the_field"
    assert await check(checker, "regex", "b") == GrammarSpec("regex", "b")


@pytest.mark.parametrize(
    "kind_text", [("json_schema", '{"enum":["ok"]}'), ("regex", '"ok"'), ("choice", '["\\"ok\\""]')]
)
@pytest.mark.parametrize(
    ("is_thinking", "text", "is_right"),
    [
        (False, '"ok"', True),
        (False, '<think>hm, "no</think>\n\n"ok"', True),
        (False, 'hm</think>"ok"', False),
        (True, 'hm </ so</think>\n"ok"', True),
        (True, 'hm</think> "no"', False),
    ],
)
async def test_thoughts_are_free_and_the_answer_after_them_is_not(
    kind_text: tuple[str, str], is_thinking: bool, text: str, is_right: bool
) -> None:
    compiler = GrammarCompiler(
        lambda: vocabulary_of(byte_tokenizer()), 300, [257], prepare=lambda spec: to_engine_form(spec, lambda _: None)
    )
    spec = after_thoughts(GrammarSpec(*kind_text), "<think>", "</think>", is_thinking=is_thinking)
    matcher = compiler.get(spec).matcher(text.encode())
    assert (matcher.error is None) == is_right
    if is_right:
        assert matcher.is_complete
    assert compiler.get(spec).spec.kind == "llguidance"


async def test_one_that_takes_too_long_is_refused() -> None:
    go_on = threading.Event()
    tokenizer = byte_tokenizer()
    tokenizer.token_bytes = lambda token_id: bytes([go_on.wait(10)])  # type: ignore[method-assign]
    checker = GrammarChecker(tokenizer, GrammarConfig(grammar_timeout=0.05))
    with pytest.raises(InvalidRequest, match="grammar-timeout"):
        await check(checker, "regex", "(")
    go_on.set()
    checker.close()
