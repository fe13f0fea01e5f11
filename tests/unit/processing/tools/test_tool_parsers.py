"""Tool parsers: a corpus per format, every cut of a text gives what the whole gives, and nothing ever raises."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.processing.tools import ToolOutput, detect_tools, tool_parsers
from headrace.testing.tool_calls import CODE, CORPUS, NAMES, Case, glm45, hermes_call, qwen3_coder

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
        "<function=f>",
        "<parameter=s>",
        "<parameter=n>\n",
        "\n</parameter>",
        "</function>",
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
        ("<tool_call><function=f>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("<|python_tag|>", "llama3_json"),
        ("<|python_start|>", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_formats_are_found_from_the_template(template: str, name: str | None) -> None:
    assert detect_tools(template) == name


@pytest.mark.parametrize(("name", "call"), [("qwen3_coder", qwen3_coder), ("glm45", glm45)])
def test_texts_between_tags_are_streamed_while_they_are_written(name: str, call: Callable[..., str]) -> None:
    parser = tool_parsers()[name](NAMES)
    deltas = [delta for char in call("f", s=CODE) for delta in parser.feed(char).calls]
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"s": CODE}
    assert len(deltas) > 30
