"""The shape of streams, and that a stream and a plain reply say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.client.base import Delta
from headrace.testing.front_end import FakeClient, FrontEnd, events, make_front_end, rows, says
from headrace.transport.messages import Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]


def choices(chunks: Sequence[Any]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def test_chat_stream_is_role_content_finish_done(front_end: FrontEnd) -> None:
    response = await front_end.chat(stream=True)
    chunks = events(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {front_end.submit.public_id}
    assert len({(chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    first, *content, last = choices(chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in content] == [{"content": letter} for letter in "Hello"]
    assert {choice["finish_reason"] for choice in (first, *content)} == {None}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert response.headers["cache-control"] == "no-cache"


async def test_completion_stream_is_text_finish_done(front_end: FrontEnd) -> None:
    chunks = events(await front_end.complete(stream=True))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    *content, last = choices(chunks)
    assert [choice["text"] for choice in content] == list("Hello")
    assert (last["text"], last["finish_reason"]) == ("", "stop")


async def test_the_finish_chunk_is_apart_even_when_the_engine_ends_with_text(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        return [[Delta(0, list(b"all"), finish_reason=FinishReason.LENGTH)]]

    front_end = make(client=FakeClient(script=script))
    deltas = [choice["delta"] for choice in choices(events(await front_end.chat(stream=True)))]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "all"}, {}]
    texts = [choice["text"] for choice in choices(events(await front_end.complete(stream=True)))]
    assert texts == ["all", ""]


async def test_a_choice_without_text_still_has_role_and_finish(make: Make) -> None:
    front_end = make(client=FakeClient(script=says("")))
    deltas = [choice["delta"] for choice in choices(events(await front_end.chat(stream=True)))]
    assert deltas == [{"role": "assistant", "content": ""}, {}]
    (only,) = choices(events(await front_end.complete(stream=True)))
    assert (only["text"], only["finish_reason"]) == ("", "stop")


async def test_no_empty_deltas_inside_characters_and_stop_strings(make: Make) -> None:
    front_end = make(client=FakeClient(script=says("h\u00e9 \U0001f600! END of it")))
    response = await front_end.chat(stream=True, stop=["END"], logprobs=True, return_token_ids=True)
    first, *content, last = choices(events(response))
    assert all(choice["delta"]["content"] for choice in content)
    assert "".join(choice["delta"]["content"] for choice in content) == "h\u00e9 \U0001f600! "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    num_tokens = sum(len(choice.get("token_ids", ())) for choice in (*content, last))
    num_rows = sum(len((choice["logprobs"] or {"content": ()})["content"]) for choice in (*content, last))
    assert num_tokens == num_rows == len("h\u00e9 \U0001f600! ".encode())
    assert first["logprobs"] is None
    assert front_end.client.streams[0].aborted == [0]


async def test_usage_comes_last_and_once(front_end: FrontEnd) -> None:
    *chunks, usage = events(await front_end.complete(stream=True, stream_options={"include_usage": True}, n=2))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 10,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}


async def test_continuous_usage_grows(front_end: FrontEnd) -> None:
    options = {"continuous_usage_stats": True}
    chunks = events(await front_end.complete(stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 5]
    chunks = events(await front_end.complete(stream=True, stream_options={**options, "include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_stream_options_need_a_stream(front_end: FrontEnd) -> None:
    response = await front_end.complete(stream_options={"include_usage": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


async def test_headers_wait_for_the_first_output(make: Make) -> None:
    """So that what goes wrong in the queue can still be told by a status."""
    client = FakeClient()
    client.gate.clear()
    front_end = make(client=client)
    task = asyncio.create_task(front_end.complete(stream=True))
    await asyncio.wait_for(client.submitted.wait(), 5)
    await asyncio.wait_for(client.streams[0].is_read.wait(), 5)
    assert not task.done()
    client.gate.set()
    assert (await task).status_code == 200


async def test_rows_of_the_prompt_are_no_event_of_their_own(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, prompt_logprobs=rows([1], 2))]
        yield [Delta(0, prompt_logprobs=rows([2, 3], 2))]
        yield [Delta(0, list(b"a"))]
        yield [Delta(0, list(b"b"), finish_reason=FinishReason.LENGTH)]

    front_end = make(client=FakeClient(script=script))
    fields = {"prompt": [9, 1, 2, 3], "prompt_logprobs": 1, "stream": True}
    first, *others = choices(events(await front_end.complete(**fields)))
    assert first["text"] == "a"
    assert [entry and sorted(entry) for entry in first["prompt_logprobs"][:2]] == [None, ["1", "2"]]
    assert all("prompt_logprobs" not in choice for choice in others)


async def test_rows_of_the_prompt_reach_the_choice_that_speaks_first(make: Make) -> None:
    """Choice 0 brings them, but half a character holds its text back."""

    def script(submit: Submit) -> Iterable[list[Delta]]:
        prompt = submit.prompts[0]
        yield [Delta(0, [0xC3], prompt_logprobs=rows(prompt[1:], 1)), Delta(1, [65])]
        yield [Delta(0, [0xA9]), Delta(1, [66])]
        yield [Delta(choice, finish_reason=FinishReason.LENGTH) for choice in (0, 1)]

    front_end = make(client=FakeClient(script=script))
    fields: dict[str, Any] = {"n": 2, "prompt_logprobs": 0}
    body = (await front_end.complete(**fields)).json()
    chunks = choices(events(await front_end.complete(**fields, stream=True)))
    found = {choice["index"]: choice["prompt_logprobs"] for choice in chunks if "prompt_logprobs" in choice}
    assert found == {choice["index"]: choice["prompt_logprobs"] for choice in body["choices"]}
    whole_rows = (await front_end.chat(**fields)).json()["prompt_logprobs"]
    frames = events(await front_end.chat(**fields, stream=True))
    assert [frame["prompt_logprobs"] for frame in frames if "prompt_logprobs" in frame] == [whole_rows]


def joined(chunks: list[Any], is_chat: bool) -> dict[int, dict[str, Any]]:
    """A stream put together again, by choice."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in choices(chunks):
        parts = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "finish": None})
        parts["text"] += choice["delta"].get("content", "") if is_chat else choice["text"]
        parts["token_ids"] += choice.get("token_ids", [])
        if choice["logprobs"]:
            parts["logprobs"] += listed(choice["logprobs"], is_chat)
        if choice["finish_reason"]:
            assert parts["finish"] is None, "one finish per choice"
            parts["finish"] = (choice["finish_reason"], choice["stop_reason"])
    return whole


def listed(logprobs: dict[str, Any], is_chat: bool) -> list[Any]:
    if is_chat:
        content: list[Any] = logprobs["content"]
        return content
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in columns), strict=True))


def whole(body: dict[str, Any], is_chat: bool) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if is_chat else choice["text"],
            "token_ids": choice.get("token_ids", []),
            "logprobs": listed(choice["logprobs"], is_chat) if choice["logprobs"] else [],
            "finish": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in body["choices"]
    }


def cut(text: str, sizes: list[int], reason: FinishReason, ends_with_text: bool) -> Callable[[Submit], Any]:
    """Every choice says `text`, cut into deltas of these sizes of tokens."""

    def script(submit: Submit) -> Iterable[list[Delta]]:
        num_choices = len(submit.prompts) * submit.params.n
        ids, start, turn = list(text.encode()), 0, 0
        while start < len(ids):
            size = sizes[turn % len(sizes)]
            part, start, turn = ids[start : start + size], start + size, turn + 1
            step = []
            for choice in range(num_choices):
                delta = Delta(choice, list(part))
                if submit.params.logprobs is not None:
                    delta.logprobs = rows(part, submit.params.logprobs + 1)
                if turn == 1 and submit.params.prompt_logprobs is not None:
                    prompt = submit.prompts[choice // submit.params.n]
                    if len(prompt) > 1:
                        delta.prompt_logprobs = rows(prompt[1:], submit.params.prompt_logprobs + 1)
                if ends_with_text and start >= len(ids):
                    delta.finish_reason = reason
                step.append(delta)
            yield step
        if not (ends_with_text and ids):
            yield [Delta(choice, finish_reason=reason) for choice in range(num_choices)]

    return script


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="ab \u00e9\u4e2d\U0001f600ENDX", max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    ends_with_text=st.booleans(),
    is_chat=st.booleans(),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 3),
            "stop": st.just(["END", "Xb"]),
            "return_token_ids": st.booleans(),
            "return_tokens_as_token_ids": st.booleans(),
            "logprobs": st.booleans(),
            "echo": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
        },
    ),
)
def test_a_stream_says_what_the_plain_reply_says(
    text: str, sizes: list[int], reason: FinishReason, ends_with_text: bool, is_chat: bool, fields: dict[str, Any]
) -> None:
    async def run() -> tuple[Any, Any, Any, Any]:
        front_end = make_front_end(client=FakeClient(script=cut(text, sizes, reason, ends_with_text)))
        body = dict(fields)
        if is_chat:
            send = front_end.chat
            if body.get("logprobs"):
                body["top_logprobs"] = 2
        else:
            send = front_end.complete
            body["prompt"] = ["Hi", "Ho"]
            body["logprobs"] = 1 if body.get("logprobs") else None
        try:
            plain = await send(**body)
            assert plain.status_code == 200, plain.text
            *chunks, usage = events(await send(**body, stream=True, stream_options={"include_usage": True}))
        finally:
            await front_end.close()
        return plain.json(), chunks, usage, is_chat

    body, chunks, usage, _ = asyncio.run(run())
    assert joined(chunks, is_chat) == whole(body, is_chat)
    assert usage["usage"] == body["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_frames_of_text_alone_are_made_quicker_and_look_the_same(make: Make, path: str) -> None:
    """Continuous usage takes the long way for every frame, its absence only for the first and the last of a choice."""
    front_end = make(client=FakeClient(script=says('a"\\\u00e9\n\U0001f642z')))
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
    long_way = {"include_usage": True, "continuous_usage_stats": True}
    plain, with_usage = [
        [
            {key: value for key, value in event.items() if key not in ("id", "created", "usage")}
            for event in events(await front_end.post(path, {**body, "stream_options": options}))
            if event["choices"]
        ]
        for options in (None, long_way)
    ]
    assert plain == with_usage
    assert len(plain) > 10
