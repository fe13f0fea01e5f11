"""/v1/messages and count_tokens: what reaches the model, the reply, the events of a stream, Anthropic's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.client.base import Delta
from headrace.errors import QueueFull
from headrace.testing.events import named_events
from headrace.testing.front_end import FakeClient, FrontEnd, says
from headrace.transport.messages import Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALLS = '<think>hm</think>Well <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARSERS = {"reasoning_parser": "think", "tool_parser": "hermes"}


async def ask(front_end: FrontEnd, **fields: Any) -> Any:
    response = await front_end.post("/v1/messages", {"messages": HI, "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def prompt(front_end: FrontEnd) -> str:
    """What the model got, without special tokens."""
    return bytes(token_id for token_id in front_end.submit.prompts[0] if token_id < 256).decode()


async def test_a_message(front_end: FrontEnd) -> None:
    body = await ask(front_end, system=[{"type": "text", "text": "Be brief."}], metadata={"user_id": "x"})
    assert body.pop("id") == front_end.submit.public_id
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(front_end.submit.prompts[0]),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
        "weight_version": "step-7",
    }
    assert prompt(front_end) == "system\nBe brief.\nuser\nHi\nassistant\n"


async def test_why_it_stopped(make: Make) -> None:
    body = await ask(make(), stop_sequences=["lo"])
    assert (body["stop_reason"], body["stop_sequence"], body["content"][0]["text"]) == ("stop_sequence", "lo", "Hel")
    body = await ask(make(client=FakeClient(script=says("a", reason=FinishReason.LENGTH))))
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert (await ask(make(client=FakeClient(script=says("")))))["content"] == []


async def test_cached_tokens_are_counted_apart(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, [97], num_cached_tokens=8, finish_reason=FinishReason.LENGTH)]

    front_end = make(client=FakeClient(script=script))
    usage = (await ask(front_end))["usage"]
    assert usage["cache_read_input_tokens"] == 8
    assert usage["input_tokens"] == len(front_end.submit.prompts[0]) - 8


async def test_events_of_a_stream(front_end: FrontEnd) -> None:
    events = named_events(
        await front_end.post("/v1/messages", {"messages": HI, "max_tokens": 9, "stream": True, "temperature": 0})
    )
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 5, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


async def test_thoughts_and_calls_are_blocks(make: Make) -> None:
    front_end = make(client=FakeClient(script=says(CALLS)), parsing=PARSERS)
    body = await ask(front_end, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text, call = body["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "Well"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert body["stop_reason"] == "tool_use"
    body = await ask(front_end, tools=TOOLS, tool_choice={"type": "none"})
    assert "tool_call" in body["content"][-1]["text"]


async def test_forms_and_forced_calls_reach_the_engine(make: Make) -> None:
    front_end = make(parsing=PARSERS)
    form = {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}
    await ask(front_end, output_config=form)
    assert front_end.submit.params.grammar is not None
    assert "boolean" in front_end.submit.params.grammar.text
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        await ask(front_end, tools=TOOLS, tool_choice=choice)
        assert front_end.submit.params.grammar is not None
        assert "tool_call" in front_end.submit.params.grammar.text
    body = {"messages": HI, "max_tokens": 9, "output_config": form, "tools": TOOLS, "tool_choice": {"type": "any"}}
    response = await front_end.post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


async def test_a_conversation_with_tools_and_thoughts_reaches_the_template(make: Make) -> None:
    front_end = make()
    conversation = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Calling."},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    await ask(front_end, messages=conversation)
    assert prompt(front_end) == "user\nHi\nassistant\nCalling.\ntool\n4\nuser\nGo on.\nassistant\n"


async def test_a_last_message_of_the_assistant_is_continued(front_end: FrontEnd) -> None:
    await ask(front_end, messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert prompt(front_end) == "user\nHi\nassistant\nThe answer is"


async def test_counting_is_what_generation_sees(front_end: FrontEnd) -> None:
    response = await front_end.post("/v1/messages/count_tokens", {"messages": HI, "system": "Be brief."})
    await ask(front_end, system="Be brief.")
    assert response.json() == {"input_tokens": len(front_end.submit.prompts[0])}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"container": "x"}, "container"),
    ],
)
async def test_refusals_name_the_field(front_end: FrontEnd, fields: dict[str, Any], param: str) -> None:
    body = {"messages": HI, "max_tokens": 9, **fields}
    response = await front_end.post("/v1/messages", body)
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    assert (response.json()["error"]["type"], response.json()["error"]["param"]) == ("invalid_request_error", param)


async def test_other_errors_have_anthropic_s_words(make: Make) -> None:
    body = {"messages": HI, "max_tokens": 9}
    full = FakeClient(error=QueueFull("full", retry_after_s=3))
    response = await make(client=full).post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers["retry-after"] == "3"
    response = await make(server={"api_key": ("k",)}).post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    response = await make(admission={"max_body_bytes": 5}).post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    response = await make().post("/v1/messages", {**body, "model": "other"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_what_a_control_operation_ended_is_an_error(make: Make) -> None:
    front_end = make(client=FakeClient(script=says("so", reason=FinishReason.ABORT)))
    body = {"messages": HI, "max_tokens": 9}
    response = await front_end.post("/v1/messages", body)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    events = named_events(await front_end.post("/v1/messages", {**body, "stream": True}))
    assert (events[-1]["type"], events[-1]["error"]["code"]) == ("error", "aborted")
    assert "message_stop" not in [event["type"] for event in events]
