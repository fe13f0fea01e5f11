"""Tool parsers: a corpus per format, every cut of a text gives what the whole gives, and nothing ever raises."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.processing.tools import ToolOutput, detect_tools, tool_parsers

# `text`: what a model writes; what is cut off or broken keeps what had been passed on.
NAMES = frozenset({"f", "get_weather", "look_up", "a.b"})
ARGUMENTS = (
    "{}",
    "{ }",
    '{"city": "Oslo", "days": 3}',
    '{"i":-12,"f":1.5e-3,"n":null,"t":true,"z":0}',
    '{"nested": {"list": [1, [], {}, {"a": [null]}]}, "empty": ""}',
    r'{"escapes": "\u00e9\n\t\"\\\/ \ud83d\ude00", "raw": "é 😀 日本"}',
    '{\n  "spaced" : [ 1 , 2 ]\n}',
    '{"code": "if (a < b) { return \\"</tool\\"; } // [TOOL_CALLS] <tool_call>"}',
)


@dataclass(frozen=True)
class Case:
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    *(Case(hermes_call("f", text), "", [("f", text)]) for text in ARGUMENTS),
    Case("Just text, 1 < 2.\n", "Just text, 1 < 2.\n"),
    Case(" <tool", " <tool"),
    Case(
        "Let me see.\n\n" + hermes_call("f", "{}") + "\n" + hermes_call("look_up", '{"q": 1}') + "\n",
        "Let me see.",
        [("f", "{}"), ("look_up", '{"q": 1}')],
    ),
    Case("a" + hermes_call("f", "{}") + " b", "ab", [("f", "{}")]),
    Case('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    Case('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    Case('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    Case(r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n\"}"}</tool_call>', "", [("f", '{"a": "\\n"}')]),
    Case('<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>', "", [("f", "{}")]),
    Case(r'<tool_call>{"name": "caf\u00e9", "arguments": {}}</tool_call>', "", [("café", "{}")]),
    # cut off
    Case('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu'),
    Case('<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": tr')]),
    Case('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', "", [("f", '{"a": 1}')]),
    # no call, or one that breaks
    Case("<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>"),
    Case('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    Case('<tool_call>{"name": ""}', '<tool_call>{"name": ""}'),
    Case('<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}'),
    Case('<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}'),
    Case(r'<tool_call>{"name": "\ud800", "arguments": {}}', r'<tool_call>{"name": "\ud800", "arguments": {}}'),
    Case('<tool_call>{"name": <tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name":', [("f", "{}")]),
    Case('<tool_call>{"name": "f", "arguments": {"a": nil}}', "nil}}", [("f", '{"a": ')]),
    Case('<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    Case('<tool_call>{"name": "f", "arguments": {}}} more', "} more", [("f", "{}")]),
]
LLAMA3 = [
    *(Case(f'{{"name": "f", "parameters": {text}}}', "", [("f", text)]) for text in ARGUMENTS),
    Case('<|python_tag|>{"name": "any", "parameters": {}}', "", [("any", "{}")]),
    Case('{"type": "function", "name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    Case(
        '{"name": "f", "parameters": {}}; {"name": "look_up", "parameters": {"q": "x"}}\n',
        "",
        [("f", "{}"), ("look_up", '{"q": "x"}')],
    ),
    Case("Plain { text", "Plain { text"),
    Case('{"city": "Oslo"}', '{"city": "Oslo"}'),
    Case('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'),
    Case('text <|python_tag|>{"name": "any"}', "text", [("any", "{}")]),
    Case('<|python_tag|>brave.call(query="x")', '<|python_tag|>brave.call(query="x")'),
    Case('{"name": "f", "parameters": {}}; then', "; then", [("f", "{}")]),
    Case('{"name": "f", "para', '{"name": "f", "para'),
    Case("\n\n", "\n\n"),
]
MISTRAL = [
    *(Case(f'[TOOL_CALLS][{{"name": "f", "arguments": {text}}}]', "", [("f", text)]) for text in ARGUMENTS),
    *(Case(f"[TOOL_CALLS]f[ARGS]{text}", "", [("f", text)]) for text in ARGUMENTS),
    *(Case(f"[TOOL_CALLS]f{text}", "", [("f", text)]) for text in ARGUMENTS),
    Case(
        'Yes. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "look_up", "arguments": {"q": [1]}}]',
        "Yes.",
        [("f", "{}"), ("look_up", '{"q": [1]}')],
    ),
    Case(
        '[TOOL_CALLS]f{}[TOOL_CALLS]look_up[CALL_ID]abcdefgh1[ARGS]{"a": 1}', "", [("f", "{}"), ("look_up", '{"a": 1}')]
    ),
    Case("[TOOL_CAL", "[TOOL_CAL"),
    Case("[TOOL_CALLS]", "[TOOL_CALLS]"),
    Case("[TOOL_CALLS] what?", "[TOOL_CALLS] what?"),
    Case('[TOOL_CALLS][{"name": "f", "arguments": {}}, oops]', ", oops]", [("f", "{}")]),
    Case('[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ')]),
    Case("[see] [1]", "[see] [1]"),
]
DEEPSEEK = [
    *(
        Case(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            f"{text}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("f", text)],
        )
        for text in ARGUMENTS
    ),
    *(
        Case(
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [("f", text)],
        )
        for text in ARGUMENTS
    ),
    Case(
        "Now.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"q": 1}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Now.",
        [("f", "{}"), ("look_up", '{"q": 1}')],
    ),
    Case("<｜tool▁calls▁begin｜>hello", "<｜tool▁calls▁begin｜>hello"),
    Case(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁"
    ),
    Case('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a"', "", [("f", '{"a"')]),
    Case("a ｜ b <｜", "a ｜ b <｜"),
]
PYTHONIC = [
    Case("[f()]", "", [("f", "{}")]),
    Case('[get_weather(city="Oslo", days=3)]', "", [("get_weather", '{"city": "Oslo", "days": 3}')]),
    Case(
        "[f(a=[1, {'k': (2, None)}], b=-1.5, c=True, d=null), look_up(q='it\\'s [x], ok')]",
        "",
        [
            ("f", '{"a": [1, {"k": [2, null]}], "b": -1.5, "c": true, "d": null}'),
            ("look_up", '{"q": "it\'s [x], ok"}'),
        ],
    ),
    Case("[a.b( x = 'é\\n' , )]", "", [("a.b", '{"x": "é\\n"}')]),
    Case("<|python_start|>[f()]<|python_end|>", "", [("f", "{}")]),
    Case(r"[f(p='\d')]", "", [("f", '{"p": "\\\\d"}')]),
    Case("[unknown()]", "[unknown()]"),
    Case("[1, 2]", "[1, 2]"),
    Case("[link](http://x)", "[link](http://x)"),
    Case("text [f()]", "text [f()]"),
    Case("[f(1)]", "[f(1)]"),
    Case("[f(a=g())]", "[f(a=g())]"),
    Case("[f(a=1e999)]", "[f(a=1e999)]"),
    Case("[f(a=1, b=x y), look_up()]", ", b=x y), look_up()]", [("f", '{"a": 1')]),
    Case("[f(a=1, a=2)]", ", a=2)]", [("f", '{"a": 1')]),
    Case("[f(a='cut", "[f(a='cut"),
    Case("[f(a=1)] and more", "and more", [("f", '{"a": 1}')]),
    Case("[f(a=(1])]", "[f(a=(1])]"),
]
CORPUS = {
    "hermes": HERMES,
    "ernie_x1": HERMES,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "pythonic": PYTHONIC,
}

FORMATS = sorted(CORPUS)
CASES = [(name, case) for name in FORMATS for case in CORPUS[name]]
IDS = [f"{name}-{case.text[:40]!r}" for name, case in CASES]


def parse(name: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """All content, and the calls as name and arguments; checks how the deltas hang together."""
    parser = tool_parsers()[name](NAMES)
    content = ""
    calls: list[tuple[str, str]] = []
    ids = set()
    outputs: list[ToolOutput] = [*map(parser.feed, pieces), parser.finish()]
    for output in outputs:
        content += output.content
        for delta in output.calls:
            if delta.index == len(calls):
                assert delta.name
                assert delta.id
                ids.add(delta.id)
                calls.append((delta.name, delta.arguments))
            else:
                assert delta.index == len(calls) - 1, "a call's pieces come in a row"
                assert (delta.id, delta.name) == (None, None)
                assert delta.arguments
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert len(ids) == len(calls)
    return content, calls


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_the_corpus(name: str, case: Case) -> None:
    assert parse(name, [case.text]) == (case.content, case.calls)
    assert parse(name, case.text) == (case.content, case.calls)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_every_cut_in_two_gives_the_same(name: str, case: Case) -> None:
    for cut in range(len(case.text)):
        assert parse(name, [case.text[:cut], case.text[cut:]]) == (case.content, case.calls)


@pytest.mark.parametrize(("name", "case"), CASES, ids=IDS)
def test_a_text_cut_off_anywhere_gives_the_same_in_pieces(name: str, case: Case) -> None:
    for end in range(len(case.text)):
        assert parse(name, case.text[:end]) == parse(name, [case.text[:end]])


MARKERS = sorted({marker for parser in tool_parsers().values() for marker in parser.markers})
FRAGMENTS = [
    *MARKERS,
    *(
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": {"a": ',
        "f",
        "function",
        "```json\n",
        "```",
        '"',
        "\\",
    ),
    *(
        "\\",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ";",
        ":",
        "=",
        "1",
        "-",
        "true",
        "nul",
        " ",
        "\n",
        "x",
        "é",
        "[f(",
        "a=",
        "'",
    ),
]


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """A text of a format's bits, or one of the corpus with a change, in pieces."""
    if draw(st.booleans()):
        text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=25)))
    else:
        text = draw(st.sampled_from([case.text for _, case in CASES]))
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(FRAGMENTS)) + text[at + draw(st.integers(0, 3)) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=600, deadline=None)
@given(pieces(), st.sampled_from(FORMATS))
def test_any_text_in_any_pieces_never_raises_and_gives_the_same(pieces: list[str], name: str) -> None:
    text = "".join(pieces)
    content, calls = parse(name, pieces)
    assert (content, calls) == parse(name, [text])
    if not calls:
        assert content == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans(), st.sampled_from([None, 2]), st.randoms())
def test_arguments_come_through_as_they_are(
    arguments: dict[str, object], ascii: bool, indent: int | None, rng: random.Random
) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    for name, whole in (
        ("hermes", hermes_call("f", text)),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{text}"),
        ("llama3_json", f'{{"name": "f", "parameters": {text}}}'),
    ):
        cuts = sorted(rng.randint(0, len(whole)) for _ in range(5))
        parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert parse(name, parts) == ("", [("f", text)])
        assert json.loads(text) == arguments


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(str.isidentifier), json_values, max_size=4))
def test_python_arguments_mean_the_same(arguments: dict[str, object]) -> None:
    from keyword import iskeyword

    text = f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items() if not iskeyword(key))})]"
    content, calls = parse("pythonic", text)
    if calls and content == "":
        assert json.loads(calls[0][1]) == {key: value for key, value in arguments.items() if not iskeyword(key)}
    assert content + "".join(name for name, _ in calls)


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = tool_parsers()["hermes"](NAMES)
    text = '<tool_call>{"name": "f", "arguments": {"text": "one two three", "n": 12, "x": '
    deltas = [call for char in text for call in parser.feed(char).calls]
    assert "".join(delta.arguments for delta in deltas) == '{"text": "one two three", "n": 12, "x": '
    assert len(deltas) > 20


def test_content_is_not_held_back_without_need() -> None:
    for name in FORMATS:
        parser = tool_parsers()[name](NAMES)
        assert parser.feed("Hello there").content == "Hello there"


def test_no_part_of_a_marker_is_ever_content() -> None:
    for name in FORMATS:
        for case in CORPUS[name]:
            if case.content or not case.calls:
                continue
            parser = tool_parsers()[name](NAMES)
            assert not any(parser.feed(char).content for char in case.text), case


def test_ids() -> None:
    def ids(name: str, text: str) -> list[str]:
        parser = tool_parsers()[name](NAMES)
        return [call.id for call in parser.feed(text).calls if call.id]

    assert re.fullmatch(r"call_[0-9a-f]{24}", ids("hermes", hermes_call("f", "{}"))[0])
    assert re.fullmatch(r"[0-9A-Za-z]{9}", ids("mistral", "[TOOL_CALLS]f{}")[0])
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}") == ["abcdefgh1"]
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}") != ["short"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call> <response>", "ernie_x1"),
        ("<tool_call><function=f>", None),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("<|python_tag|>", "llama3_json"),
        ("<|python_start|>", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_formats_are_found_from_the_template(template: str, name: str | None) -> None:
    assert detect_tools(template) == name
