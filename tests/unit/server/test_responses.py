"""/v1/responses: what reaches the model, the object, the events of a stream, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from headrace.testing.events import named_events
from headrace.testing.front_end import FakeClient, FrontEnd, says
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]
PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
CALLS = '<think>hm</think>Well <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARSERS = {"reasoning_parser": "think", "tool_parser": "hermes"}


async def ask(front_end: FrontEnd, **fields: Any) -> Any:
    response = await front_end.post(PATH, {"input": "Hi", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def prompt(front_end: FrontEnd) -> str:
    """What the model got, without special tokens."""
    return bytes(token_id for token_id in front_end.submit.prompts[0] if token_id < 256).decode()


async def test_a_response(front_end: FrontEnd) -> None:
    body = await ask(front_end, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9, temperature=0.5)
    assert body["id"] == front_end.submit.public_id
    assert prompt(front_end) == "system\nBe brief.\nuser\nHi\nassistant\n"
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    num_prompt = len(front_end.submit.prompts[0])
    assert body["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 5,
    }
    same = ("object", "status", "metadata", "max_output_tokens", "temperature", "instructions", "weight_version")
    assert [body[name] for name in same] == ["response", "completed", {"a": "b"}, 9, 0.5, "Be brief.", "step-7"]


async def test_how_it_ended(make: Make) -> None:
    body = await ask(make(client=FakeClient(script=says("a", reason=FinishReason.LENGTH))))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    front_end = make(client=FakeClient(script=says("a", reason=FinishReason.ABORT)))
    assert (await ask(front_end))["status"] == "cancelled"
    events = named_events(await front_end.post(PATH, {"input": "Hi", "stream": True}))
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    assert (await ask(make(client=FakeClient(script=says("")))))["output"] == []


async def test_events_of_a_stream(front_end: FrontEnd) -> None:
    events = named_events(await front_end.post(PATH, {"input": "Hi", "stream": True}))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 5,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    kept = (await front_end.http.get(f"{PATH}/{events[-1]['response']['id']}")).json()
    assert kept == events[-1]["response"]


async def test_a_stream_that_fails_says_so_in_its_last_event(make: Make) -> None:
    front_end = make(client=FakeClient(script=says("ab", reason=FinishReason.ERROR)))
    events = named_events(await front_end.post(PATH, {"input": "Hi", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert (await front_end.http.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_thoughts_and_calls_are_items(make: Make) -> None:
    front_end = make(client=FakeClient(script=says(CALLS)), parsing=PARSERS)
    body = await ask(front_end, tools=TOOLS)
    thoughts, message, call = body["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Well"
    assert (call["name"], call["arguments"]) == ("add", '{"a": 1}')
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_forms_and_forced_calls_reach_the_engine(make: Make) -> None:
    front_end = make(parsing=PARSERS)
    form = {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}, "strict": True}
    body = await ask(front_end, text={"format": form})
    assert body["text"] == {"format": form}
    assert front_end.submit.params.grammar is not None
    assert "boolean" in front_end.submit.params.grammar.text
    await ask(front_end, text={"format": {"type": "json_object"}})
    assert front_end.submit.params.grammar is not None
    for choice in ("required", {"type": "function", "name": "add"}):
        await ask(front_end, tools=TOOLS, tool_choice=choice)
        assert front_end.submit.params.grammar is not None
        assert "tool_call" in front_end.submit.params.grammar.text
    both = await front_end.post(PATH, {"input": "x", "text": {"format": form}, "tools": TOOLS, "tool_choice": choice})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "tool_choice")
    await ask(front_end, text={"format": {"type": "text"}}, tools=TOOLS, tool_choice="auto")
    assert front_end.submit.params.grammar is None


async def test_logprobs_are_included_on_demand(front_end: FrontEnd) -> None:
    body = await ask(front_end, include=["message.output_text.logprobs"], top_logprobs=1)
    rows = body["output"][0]["content"][0]["logprobs"]
    assert [row["token"] for row in rows] == list("Hello")
    assert [len(row["top_logprobs"]) for row in rows] == [1] * 5


async def test_items_become_messages(front_end: FrontEnd) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Calling."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    await ask(front_end, input=items)
    assert prompt(front_end) == "system\nBe brief.\nuser\n2+2?\nassistant\nCalling.\ntool\n4\nassistant\n"


async def test_a_response_is_continued(front_end: FrontEnd) -> None:
    first = await ask(front_end, instructions="Be brief.")
    second = await ask(front_end, input="More", previous_response_id=first["id"])
    assert prompt(front_end) == "user\nHi\nassistant\nHello\nuser\nMore\nassistant\n"
    assert second["previous_response_id"] == first["id"]
    await ask(front_end, input="Again", previous_response_id=second["id"])
    assert prompt(front_end).startswith("user\nHi\nassistant\nHello\nuser\nMore\nassistant\nHello\nuser\nAgain\n")


async def test_what_is_kept_can_be_read_and_deleted(front_end: FrontEnd) -> None:
    body = await ask(front_end)
    path = f"{PATH}/{body['id']}"
    assert (await front_end.http.get(path)).json() == body
    cancelled = await front_end.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (400, "has_ended")
    assert (await front_end.http.get(path, params={"stream": "true"})).status_code == 400
    assert (await front_end.http.delete(path)).json() == {"id": body["id"], "object": "response", "deleted": True}
    for request in (front_end.http.get(path), front_end.http.delete(path), front_end.post(f"{path}/cancel")):
        assert (await request).status_code == 404
    unknown = await front_end.post(PATH, {"input": "x", "previous_response_id": body["id"]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "previous_response_id")


async def test_its_input_can_be_read_as_items(front_end: FrontEnd) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Calling."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    first = await ask(front_end, input=items)
    second = await ask(front_end, input="More", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    page = (await front_end.http.get(path, params={"order": "asc", "limit": 100})).json()
    kinds = [item["type"] for item in page["data"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output", "message", "message"]
    assert page["data"][5]["content"][0]["text"] == "Hello"
    assert page["data"][6] | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "More"}],
        "status": "completed",
    }
    assert (page["first_id"], page["last_id"], page["has_more"]) == (
        page["data"][0]["id"], page["data"][-1]["id"], False,
    )  # fmt: skip
    await ask(front_end, input=page["data"])
    no_key: Any = {"Authorization": openai.Omit()}
    client = openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1:8000/v1", http_client=front_end.http)
    newest_first = [
        item.id async for item in client.responses.input_items.list(second["id"], limit=3, extra_headers=no_key)
    ]
    assert newest_first == [item["id"] for item in reversed(page["data"])]
    for bad in ({"limit": 0}, {"order": "up"}, {"after": "x"}):
        response = await front_end.http.get(path, params=bad)
        assert (response.status_code, response.json()["error"]["param"]) == (400, *bad)
    assert (await front_end.http.get(f"{PATH}/resp_x/input_items")).status_code == 404


async def test_what_is_not_kept(make: Make) -> None:
    front_end = make()
    body = await ask(front_end, store=False)
    assert body["store"] is False
    assert (await front_end.http.get(f"{PATH}/{body['id']}")).status_code == 404
    front_end = make(server={"response_store_bytes": 0})
    assert (await ask(front_end, store=True))["store"] is False


async def test_only_its_own_key_finds_a_response(make: Make) -> None:
    front_end = make(server={"api_key": ("a", "b")})
    owner, other = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
    body = (await front_end.post(PATH, {"input": "Hi"}, headers=owner)).json()
    path = f"{PATH}/{body['id']}"
    assert (await front_end.http.get(path, headers=other)).status_code == 404
    assert (await front_end.http.get(path, headers=owner)).status_code == 200


async def test_one_that_is_being_made_can_be_seen_and_cancelled(make: Make) -> None:
    client = FakeClient()
    client.gate.clear()
    front_end = make(client=client)
    task = asyncio.create_task(front_end.post(PATH, {"input": "Hi", "stream": True}))
    await asyncio.wait_for(client.submitted.wait(), 5)
    await asyncio.wait_for(client.streams[0].is_read.wait(), 5)
    response_id = front_end.submit.public_id
    assert (await front_end.http.get(f"{PATH}/{response_id}")).json()["status"] == "in_progress"
    cancelled = await front_end.post(f"{PATH}/{response_id}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert client.aborts[-1][1] == [response_id]
    client.gate.set()
    await task


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "very"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
async def test_refusals_name_the_field(front_end: FrontEnd, fields: dict[str, Any], param: str) -> None:
    response = await front_end.post(PATH, {"input": "Hi", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
