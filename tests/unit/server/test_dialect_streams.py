"""The streams of /generate, /v1/messages and /v1/responses say what the plain replies say, however tokens are cut."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.base import Delta
from headrace.testing.events import added_message, added_output, named_events
from headrace.testing.front_end import FakeClient, events, make_front_end, rows
from headrace.transport.messages import Submit
from headrace.types import FinishReason

PARSERS = {"reasoning_parser": "think", "tool_parser": "hermes"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "\u00e9"}}\n</tool_call>'
PIECES = ("a", " b", "\u00e9", "\U0001f600", "END", "<think>", "</think>", CALL, "<tool_call>{broken", "\n", CALL[:50])
NEW_EACH_TIME = re.compile(r"(resp|msg|rs|fc|call)_[0-9a-f]{24,32}")


def cut(text: str, sizes: list[int], reason: FinishReason) -> Any:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        ids, start, turn = list(text.encode()), 0, 0
        num_choices = len(submit.prompts) * submit.params.n
        while start < len(ids):
            part = ids[start : start + sizes[turn % len(sizes)]]
            start, turn = start + len(part), turn + 1
            versions = ((0, "v"),) if turn == 1 else ()
            deltas = [Delta(choice, list(part), weights_versions=versions) for choice in range(num_choices)]
            for delta in deltas:
                if submit.params.logprobs is not None:
                    delta.logprobs = rows(part, submit.params.logprobs + 1)
            yield deltas
        yield [Delta(choice, finish_reason=reason) for choice in range(num_choices)]

    return script


texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
sizes = st.lists(st.integers(1, 7), min_size=1, max_size=4)
reasons = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


async def both(path: str, body: dict[str, Any], text: str, sizes: list[int], reason: FinishReason) -> tuple[Any, Any]:
    """The plain reply of uncut tokens, and the stream's response of cut ones."""
    replies = []
    for more, how in (({}, [1000]), ({"stream": True}, sizes)):
        client = FakeClient(script=cut(text, how, reason))
        front_end = make_front_end(client=client, parsing=PARSERS)
        replies.append(await front_end.post(path, {**body, **more}))
        await front_end.close()
    assert replies[0].status_code == 200, replies[0].text
    return replies[0].json(), replies[1]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name != "created_at"}
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    return NEW_EACH_TIME.sub("ID", value) if isinstance(value, str) else value


@settings(max_examples=60, deadline=None)
@given(text=texts, sizes=sizes, reason=reasons, has_stop=st.booleans())
def test_messages(text: str, sizes: list[int], reason: FinishReason, has_stop: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "tools": [{"name": "f", "input_schema": {}}],
        "stop_sequences": ["END"] if has_stop else [],
    }
    plain, stream = asyncio.run(both("/v1/messages", body, text, sizes, reason))
    assert without_ids(added_message(named_events(stream))) == without_ids(plain)


@settings(max_examples=60, deadline=None)
@given(text=texts, sizes=sizes, reason=reasons, has_logprobs=st.booleans())
def test_responses(text: str, sizes: list[int], reason: FinishReason, has_logprobs: bool) -> None:
    body = {
        "input": "Hi",
        "tools": [{"type": "function", "name": "f"}],
        "include": ["message.output_text.logprobs"] if has_logprobs else [],
    }
    plain, stream = asyncio.run(both("/v1/responses", body, text, sizes, reason))
    found = named_events(stream)
    assert without_ids(found[-1]["response"]) == without_ids(plain)
    assert added_output(found) == found[-1]["response"]["output"]


@settings(max_examples=40, deadline=None)
@given(text=texts, sizes=sizes, reason=reasons, n=st.integers(1, 2), is_list=st.booleans())
def test_generate(text: str, sizes: list[int], reason: FinishReason, n: int, is_list: bool) -> None:
    body = {
        "text": ["Hi", "Ho"] if is_list else "Hi",
        "rid": "r",
        "return_logprob": True,
        "top_logprobs_num": 1,
        "sampling_params": {"n": n, "stop": ["END"]},
    }
    plain, stream = asyncio.run(both("/generate", body, text, sizes, reason))
    last: dict[int, Any] = {}
    for frame in events(stream):
        index = frame.pop("index", 0)
        assert frame["text"].startswith(last.get(index, {"text": ""})["text"])
        last[index] = frame
    assert [last[index] for index in sorted(last)] == (plain if isinstance(plain, list) else [plain])
