"""Streams of /v1/responses and /v1/messages: what the vendors' own clients put together is the plain reply, however the
text is cut, and arguments of calls come as they are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.client.base import Delta
from headrace.server.call_input import BROKEN, CallInput, whole_input
from headrace.testing.events import named_events
from headrace.testing.front_end import FakeClient, FrontEnd, make_front_end
from headrace.transport.messages import Submit
from headrace.types import FinishReason

URL = "http://127.0.0.1:8000"
PARSERS = {"reasoning_parser": "think", "tool_parser": "hermes"}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS: Any = [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}]
TOOLS: Any = [{"name": "f", "input_schema": PARAMETERS}]
HI: Any = [{"role": "user", "content": "Hi"}]


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


CALL = call('{"city": "Málaga", "n": [1, null, 1e3, {"a": "\\n"}]}')
TEXTS = [
    "",
    "Only text.",
    "<think>never ends",
    f"<think>hm</think>{CALL}",
    f"<think>hm</think>Well.\n{CALL}\n{call('{}')}",
    f"Before. {CALL} between {CALL}{CALL}\nafter. ",
    f"Well {CALL[:60]}",
    f"Well {call('{')} so",
    '<tool_call>{"name": "f", "arguments": {"a": 12, "b": nul',
    '<tool_call>{"name": "f"}</tool_call><tool_call>not one</tool_call>',
]


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in pairwise(borders)]


@contextmanager
def front_end_that_says(pieces: list[str], reason: FinishReason = FinishReason.STOP) -> Iterator[FrontEnd]:
    def script(_: Submit) -> Iterator[list[Delta]]:
        for piece in pieces:
            yield [Delta(0, list(piece.encode()))]
        yield [Delta(0, finish_reason=reason)]

    yield make_front_end(client=FakeClient(script=script), parsing=PARSERS)


REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
CUTS = st.lists(st.integers(0, 400), max_size=30)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created_at", "parsed_arguments", "parsed", "stop_details", "weight_version")
        return {key: without_ids(item) for key, item in value.items() if key not in left_out}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(st.sampled_from(TEXTS), CUTS)
async def test_what_openai_s_client_puts_together_is_the_plain_response(text: str, cuts: list[int]) -> None:
    with front_end_that_says(cut(text, cuts)) as front_end:
        client = openai.AsyncOpenAI(api_key="x", base_url=f"{URL}/v1", http_client=front_end.http, max_retries=0)
        options: Any = {"model": "fake", "input": "Hi", "tools": FUNCTIONS}
        plain = await client.responses.create(**options)
        grown: dict[int, str] = {}
        async with client.responses.stream(**options) as stream:
            async for event in stream:
                if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                    grown[event.output_index] = event.snapshot
            streamed = await stream.get_final_response()
        await front_end.close()
    assert without_ids(streamed.to_dict()) == without_ids(plain.to_dict())
    for index, item in enumerate(plain.output):
        if item.type != "reasoning":
            assert grown[index] == (item.arguments if item.type == "function_call" else item.content[0].text)


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(st.sampled_from(TEXTS), CUTS, REASONS)
async def test_what_anthropic_s_client_puts_together_is_the_plain_message(
    text: str, cuts: list[int], reason: FinishReason
) -> None:
    with front_end_that_says(cut(text, cuts), reason) as front_end:
        transport = httpx2.ASGITransport(front_end.app, client=("127.0.0.1", 5000))
        async with httpx2.AsyncClient(transport=transport, base_url=URL) as http:
            client = anthropic.AsyncAnthropic(api_key="x", base_url=URL, http_client=http, max_retries=0)
            options: Any = {"model": "fake", "max_tokens": 200, "messages": HI, "tools": TOOLS}
            plain = await client.messages.create(**options)
            async with client.messages.stream(**options) as stream:
                streamed = await stream.get_final_message()
        await front_end.close()
    assert without_ids(streamed.to_dict()) == without_ids(plain.to_dict())


async def test_arguments_come_as_they_are_written() -> None:
    with front_end_that_says([*f"Well {CALL} then {CALL}"]) as front_end:
        body: dict[str, Any] = {"input": "Hi", "tools": FUNCTIONS, "stream": True}
        events = named_events(await front_end.post("/v1/responses", body))
        body = {"messages": HI, "max_tokens": 200, "tools": TOOLS, "stream": True}
        blocks = named_events(await front_end.post("/v1/messages", body))
        await front_end.close()
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == ["message", "function_call", "message", "function_call"]
    assert len({item["id"] for item in events[-1]["response"]["output"]}) == 4
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 40
    pieces = [event["delta"]["partial_json"] for event in blocks if event.get("delta", {}).get("partial_json")]
    assert len(pieces) > 40
    assert [event["index"] for event in blocks if event["type"] == "content_block_start"] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------- arguments that are no object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(OBJECTS, st.booleans(), st.integers(0, 200), st.sampled_from(["", "}", " x", '"', "tru"]), CUTS)
def test_what_is_sent_is_an_object(value: Any, is_ascii: bool, stop: int, more: str, cuts: list[int]) -> None:
    """Cut anywhere, with anything behind."""
    whole = json.dumps(value, ensure_ascii=is_ascii)
    text = whole[:stop] + more
    found = json.loads(whole_input(text))
    try:
        expected, _ = json.JSONDecoder().raw_decode(text or "{}")
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert found == expected
    else:
        assert found[BROKEN] == text
    own = CallInput()
    pieces = [own.feed(piece) for piece in cut(text, cuts)]
    assert "".join(pieces) + own.finish() == (whole_input(text) if text else "")


@pytest.mark.parametrize(
    "text", ["[1]", "3", '"x"', "nothing", "{", '{"a"', '{"a":', '{"a": [tru', '{"a": "\\', '{"\\u00']
)
def test_what_is_no_object_is_marked(text: str) -> None:
    assert json.loads(whole_input(text))[BROKEN] == text
