"""Thoughts and tool calls in chat replies: the JSON of both modes, streamed = plain, and the fields that ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.testing.front_end import FakeClient, FrontEnd, events, make_front_end, says
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Málaga", "n": [1, null]}}\n</tool_call>'
ARGUMENTS = '{"city": "Málaga", "n": [1, null]}'
PARSERS = {"reasoning_parser": "think", "tool_parser": "hermes"}


def front_end_that_says(make: Make, text: str, **fields: Any) -> FrontEnd:
    reason = fields.pop("reason", FinishReason.STOP)
    return make(client=FakeClient(script=says(text, reason=reason)), parsing=PARSERS, **fields)


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """The message that a stream amounts to, as a client builds it, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": [], "finish": None}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            assert message["finish"] is None, "nothing comes after the finish"
            message["finish"] = choice["finish_reason"]
            assert delta == {} or choice["finish_reason"] is None
    return message


def taken_apart(body: Any) -> dict[str, Any]:
    """The same of a plain reply."""
    ChatCompletion.model_validate(body)
    message = body["choices"][0]["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "reasoning_content": message["reasoning_content"] or "",
        "calls": calls,
        "finish": body["choices"][0]["finish_reason"],
    }


async def test_a_plain_reply(make: Make) -> None:
    front_end = front_end_that_says(make, f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}")
    body = (await front_end.chat(tools=TOOLS, max_tokens=200)).json()
    message = body["choices"][0]["message"]
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": message["tool_calls"][0]["id"],
                "type": "function",
                "function": {"name": "f", "arguments": ARGUMENTS},
            }
        ],
    }
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nhm\n</think")}


async def test_a_stream(make: Make) -> None:
    front_end = front_end_that_says(make, f"<think>hm</think>Let me see. {CALL}")
    chunks = events(await front_end.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[:3] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h", "reasoning": "h"},
        {"reasoning_content": "m", "reasoning": "m"},
    ]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0] == {
        "index": 0,
        "id": calls[0]["id"],
        "type": "function",
        "function": {"name": "f", "arguments": "{"},
    }
    assert calls[1] == {"index": 0, "function": {"arguments": '"'}}
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert put_together(chunks)["content"] == "Let me see."
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm</think")


TEXTS = [
    f"<think>hm</think>{CALL}",
    f"<think>hm</think>{CALL}\n{CALL} and more",
    "<think>never ends",
    "<think></think>",
    "Only text.",
    "<tool_call>not one</tool_call>",
    CALL[:-30],
    "",
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TEXTS), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.integers(1, 3))
async def test_streamed_is_plain(text: str, reason: FinishReason, n: int) -> None:
    front_end = make_front_end(client=FakeClient(script=says(text, reason=reason)), parsing=PARSERS)
    fields: dict[str, Any] = {"tools": TOOLS, "n": n, "logprobs": True}
    body = (await front_end.chat(**fields)).json()
    chunks = events(await front_end.chat(stream=True, stream_options={"include_usage": True}, **fields))
    usage = chunks.pop()["usage"]
    await front_end.close()
    assert usage == body["usage"]
    for index, choice in enumerate(body["choices"]):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert put_together(own) == taken_apart({**body, "choices": [choice]})
        rows = [row for chunk in own for row in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]]
        assert rows == (choice["logprobs"] or {"content": []})["content"]


async def test_a_cut_off_choice_says_so_even_with_calls(make: Make) -> None:
    front_end = front_end_that_says(make, CALL + CALL[:50], reason=FinishReason.LENGTH)
    body = (await front_end.chat(tools=TOOLS)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
async def test_calls_stay_text_unless_the_model_may_call(make: Make, fields: dict[str, Any]) -> None:
    front_end = front_end_that_says(make, CALL)
    choice = (await front_end.chat(**fields)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert choice["message"]["reasoning_content"] is None
    assert "tool_calls" not in choice["message"]


async def test_parallel_tool_calls_off(make: Make) -> None:
    front_end = front_end_that_says(make, CALL + CALL)
    for parallel, number in ((True, 2), (None, 2), (False, 1)):
        body = (await front_end.chat(tools=TOOLS, parallel_tool_calls=parallel)).json()
        assert len(body["choices"][0]["message"]["tool_calls"]) == number


async def test_content_is_null_beside_calls_alone(make: Make) -> None:
    message = (await front_end_that_says(make, CALL).chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_the_continued_message_says_whether_thoughts_are_open(make: Make) -> None:
    front_end = front_end_that_says(make, " more</think>Yes")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>some"}]
    body = (await front_end.chat(messages=messages, continue_final_message=True)).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("more", "Yes")


async def test_prompts_of_token_ids_are_parsed_too(make: Make) -> None:
    front_end = front_end_that_says(make, "hm</think>Yes")
    body = (await front_end.chat(messages=None, prompt_token_ids=list(b"<think>\n"))).json()
    assert body["choices"][0]["message"]["reasoning"] == "hm"


async def test_a_server_without_parsers_has_no_new_members(make: Make) -> None:
    front_end = make(client=FakeClient(script=says(f"<think>hm</think>{CALL}")))
    message = (await front_end.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": f"<think>hm</think>{CALL}", "refusal": None}


async def test_a_conversation_with_calls_and_results_is_rendered(make: Make) -> None:
    from headrace.processing.chat_template import ChatTemplate
    from headrace.testing.bytes import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}={{ m.content }};{% for c in m.tool_calls %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %} {{ k }}:{{ v }}{% endfor %};{% endfor %}{% endfor %}"
    )
    front_end = make(tokenizer=tokenizer)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bare = {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": ""}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "assistant", "content": "Fine.", "tool_calls": []},
    ]
    assert (await front_end.chat(messages=messages)).status_code == 200
    rendered = bytes(front_end.submit.prompts[0]).decode()
    assert rendered == "user=Hi;assistant=;f a:1;g;tool=42;assistant=Fine.;"
