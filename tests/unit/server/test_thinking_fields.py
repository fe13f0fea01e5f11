"""The fields that bound or hide thoughts: what they become for the engine, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.testing.front_end import FakeClient, FrontEnd, events, says
from headrace.types import ThinkingBudget

Make = Callable[..., FrontEnd]
THINK = {"parsing": {"reasoning_parser": "think"}}
R1 = {"parsing": {"reasoning_parser": "deepseek_r1"}}
HI = [{"role": "user", "content": "Hi"}]


def budget(max_tokens: int, *, is_open: bool) -> ThinkingBudget:
    return ThinkingBudget(is_open, tuple(b"<think>"), tuple(b"</think>"), max_tokens)


@pytest.mark.parametrize("field", ["reasoning_max_tokens", "thinking_token_budget", "thinking_budget"])
async def test_a_budget_reaches_the_engine_under_each_of_its_names(make: Make, field: str) -> None:
    front_end = make(**THINK)
    for value in (0, 7):
        assert (await front_end.chat(**{field: value})).status_code == 200
        assert front_end.submit.params.thinking == budget(value, is_open=False)
    await front_end.chat(**{field: 5}, response_format={"type": "json_object"})
    assert front_end.submit.params.thinking == budget(5, is_open=False)
    assert front_end.submit.params.grammar is not None
    assert "grammars" in front_end.submit.params.grammar.text, "thoughts may come before the answer"
    await front_end.chat()
    assert front_end.submit.params.thinking is None


async def test_what_the_prompt_says_of_thoughts(make: Make) -> None:
    front_end = make(**R1)
    await front_end.chat(reasoning_max_tokens=3, n=2)
    assert front_end.submit.params.thinking == budget(3, is_open=True)
    closed = [*HI, {"role": "assistant", "content": "<think>hm</think>So"}]
    await front_end.chat(reasoning_max_tokens=3, messages=closed, continue_final_message=True)
    assert front_end.submit.params.thinking is None


async def test_anthropic_s_budget(make: Make) -> None:
    front_end = make(**R1)
    for kind, expected in (("enabled", budget(2048, is_open=True)), ("disabled", None)):
        body = {"messages": HI, "max_tokens": 9, "thinking": {"type": kind, "budget_tokens": 2048}}
        assert (await front_end.post("/v1/messages", body)).status_code == 200
        assert front_end.submit.params.thinking == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_max_tokens": -1}, "reasoning_max_tokens"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"reasoning_max_tokens": 5, "thinking_budget": 6}, "thinking_budget"),
    ],
)
async def test_refusals_name_the_field(make: Make, fields: dict[str, Any], param: str) -> None:
    response = await make(**THINK).chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("field", ["reasoning_max_tokens", "thinking_token_budget", "thinking_budget"])
async def test_a_model_without_thoughts_has_no_budget(make: Make, field: str) -> None:
    front_end = make()
    response = await front_end.chat(**{field: 5})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, "unsupported_field")
    assert not front_end.client.streams


@pytest.mark.parametrize("text", ["<think>hm</think>Yes", "Yes", "<think>hm"])
async def test_thoughts_can_be_left_out(make: Make, text: str) -> None:
    front_end = make(client=FakeClient(script=says(text)), **THINK)
    answer = "" if text == "<think>hm" else "Yes"
    body = (await front_end.chat(include_reasoning=False)).json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (answer, None, None)
    chunks = events(await front_end.chat(include_reasoning=False, stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert not any("reasoning" in delta for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == answer
    shown = (await front_end.chat(include_reasoning=True)).json()
    assert shown["usage"] == body["usage"]
    assert (shown["choices"][0]["message"]["reasoning"] or "") == ("hm" if "hm" in text else "")
