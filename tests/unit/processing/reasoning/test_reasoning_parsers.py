"""Reasoning parsers: a corpus per style, what the prompt says, and every cut of a text gives what the whole gives."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.processing.reasoning import Opening, Phase, detect_reasoning, reasoning_parsers

OPEN = Opening("<|im_start|>assistant\n<think>\n")
CLOSED = Opening("<|im_start|>assistant\n<think>\n\n</think>\n\n")
PLAIN = Opening("<|im_start|>assistant\n")
OFF = Opening("<|im_start|>assistant\n", template_kwargs={"enable_thinking": False})
CHANNEL_CLOSED = Opening("<|turn>model\n<|channel>thought\n<channel|>")

# style, what is known before, what the model says, thoughts, content
CASES = [
    ("think", PLAIN, "<think>\nwhy\n\nnot\n</think>\n\nYes.\n", "why\n\nnot", "Yes.\n"),
    ("think", PLAIN, "\n <think>why</think>Yes.", "why", "Yes."),
    ("think", PLAIN, "  Yes, 1 < 2.", "", "  Yes, 1 < 2."),
    ("think", PLAIN, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    ("think", PLAIN, "<think></think>Yes", "", "Yes"),
    ("think", PLAIN, "<think>a </thin b</think></think>", "a </thin b", "</think>"),
    ("think", PLAIN, "<think>cut off </thi", "cut off </thi", ""),
    ("think", PLAIN, "<thi", "", "<thi"),
    ("think", PLAIN, " \n", "", " \n"),
    ("think", PLAIN, "<think>\n", "", ""),
    ("think", PLAIN, "<think>a<think>b</think>c", "a<think>b", "c"),
    ("think", OPEN, "why\n</think>\n\nYes.", "why", "Yes."),
    ("think", OPEN, "why", "why", ""),
    ("think", OPEN, "<think>why</think> Yes", "why", "Yes"),
    ("think", OPEN, "</think>\nYes", "", "Yes"),
    ("think", CLOSED, " Yes </think>", "", " Yes </think>"),
    ("think", Opening("<think>\nso", is_message=True), " far</think>Yes", "far", "Yes"),
    ("think", Opening("<think>a</think>b", is_message=True), " c", "", " c"),
    ("think", Opening("A text of the user's with <think> amid it.\nassistant:"), "Yes", "", "Yes"),
    ("deepseek_r1", PLAIN, "why</think>Yes", "why", "Yes"),
    ("deepseek_r1", PLAIN, "<think>\nwhy</think>Yes", "why", "Yes"),
    ("deepseek_r1", PLAIN, "why", "why", ""),
    ("deepseek_r1", PLAIN, "<thi", "<thi", ""),
    ("deepseek_r1", Opening("<｜Assistant｜></think>"), "Yes", "", "Yes"),
    ("qwen3", PLAIN, "<think>why</think>Yes", "why", "Yes"),
    ("qwen3", OFF, "<think>why</think>Yes", "", "<think>why</think>Yes"),
    ("qwen3", CLOSED, "Yes", "", "Yes"),
    ("qwen3", OPEN, "why</think>Yes", "why", "Yes"),
    ("ernie_x1", OPEN, "\nwhy\n</think>\n\n\n<response>\nYes,\n\nindeed.\n</response>\n", "why", "Yes,\n\nindeed."),
    ("ernie_x1", OPEN, "why\n</think>\n\n\n<tool_call>\n{}\n</tool_call>\n", "why", "<tool_call>\n{}\n</tool_call>\n"),
    ("ernie_x1", OPEN, "why</think><respo", "why", "<respo"),
    ("ernie_x1", OPEN, "why</think>Yes </response>", "why", "Yes </response>"),
    ("ernie_x1", OPEN, "why</think><response>Yes\n", "why", "Yes"),
    ("ernie_x1", OPEN, "why</think><response>a</response>\n<tool_call>", "why", "a<tool_call>"),
    ("ernie_x1", CLOSED, "Yes", "", "Yes"),
    ("gemma4", PLAIN, "<|channel>thought\nwhy\n<channel|>Yes", "why", "Yes"),
    ("gemma4", PLAIN, "<|channel>thoughtful<channel|>Yes", "thoughtful", "Yes"),
    ("gemma4", PLAIN, "<|channel>tho", "", ""),
    ("gemma4", PLAIN, "Yes", "", "Yes"),
    ("gemma4", CHANNEL_CLOSED, "Yes", "", "Yes"),
]
STYLES = sorted(reasoning_parsers())


def parse(style: str, opening: Opening, pieces: Iterable[str]) -> tuple[str, str]:
    parser = reasoning_parsers()[style](opening)
    reasoning = content = ""
    phases = [parser.phase]
    num_fed = 0
    for piece in [*pieces, None]:
        split = parser.finish() if piece is None else parser.feed(piece)
        num_fed += len(piece or "")
        assert not (split.reasoning and content), "thoughts come before the answer"
        reasoning, content = reasoning + split.reasoning, content + split.content
        phases.append(parser.phase)
        assert 0 <= parser.num_held <= num_fed - len(reasoning) - len(content)
    order = list(Phase)
    assert phases == sorted(phases, key=order.index)
    assert parser.has_thought or not reasoning
    assert parser.num_held == 0
    return reasoning, content


@pytest.mark.parametrize(("style", "opening", "text", "reasoning", "content"), CASES)
def test_the_corpus(style: str, opening: Opening, text: str, reasoning: str, content: str) -> None:
    assert parse(style, opening, [text]) == (reasoning, content)
    assert parse(style, opening, text) == (reasoning, content)
    for cut in range(len(text)):
        assert parse(style, opening, [text[:cut], text[cut:]]) == (reasoning, content)


FRAGMENTS = [
    "<think>",
    "</think>",
    "<response>",
    "</response>",
    "<|channel>",
    "<channel|>",
    "thought\n",
    "<",
    "</",
    ">",
]


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([*FRAGMENTS, "thi", "nk>", " ", "\n", "a", "b c", "é"]), max_size=15),
    st.lists(st.integers(0, 80), max_size=8),
    st.sampled_from(STYLES),
    st.sampled_from([PLAIN, OPEN, CLOSED, OFF, CHANNEL_CLOSED]),
)
def test_any_text_in_any_pieces(fragments: list[str], cuts: list[int], style: str, opening: Opening) -> None:
    text = "".join(fragments)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert parse(style, opening, pieces) == parse(style, opening, [text])


def test_nothing_is_held_back_without_need() -> None:
    for style in STYLES:
        parser = reasoning_parsers()[style](PLAIN)
        split = parser.feed("Hello")
        assert split.reasoning + split.content == "Hello"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("<think>{{ x }}</think>", "think"),
        ("<think></think>{% if enable_thinking %}", "qwen3"),
        ("{{ '<｜Assistant｜>' }} </think>", "deepseek_r1"),
        ("</think> <response>", "ernie_x1"),
        ("<|channel>thought<channel|>", "gemma4"),
    ],
)
def test_styles_are_found_from_the_template(template: str, name: str | None) -> None:
    assert detect_reasoning(template) == name
