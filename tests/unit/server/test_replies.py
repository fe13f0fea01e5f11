"""The bodies of plain replies: logprobs, echo, token ids, several prompts and choices; and what reaches the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.client.base import Delta
from headrace.processing.tokenizer import Tokenizer
from headrace.testing.front_end import FakeClient, FrontEnd, rows, says
from headrace.transport.messages import Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]


async def test_chat_body(front_end: FrontEnd) -> None:
    body = (await front_end.chat(model="alias")).json()
    assert body.pop("created") > 0
    assert body == {
        "id": front_end.submit.public_id,
        "object": "chat.completion",
        "model": "alias",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(front_end.submit.prompts[0]),
            "completion_tokens": 5,
            "total_tokens": len(front_end.submit.prompts[0]) + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "weight_version": "step-7",
    }
    assert body["id"].startswith("chatcmpl-")


async def test_completion_body(front_end: FrontEnd) -> None:
    body = (await front_end.complete()).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_the_four_kinds_of_prompt(front_end: FrontEnd, prompt: Any, expected: list[bytes]) -> None:
    body = (await front_end.complete(prompt=prompt, n=2)).json()
    assert front_end.submit.prompts == tuple(tuple(text) for text in expected)
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert body["usage"]["completion_tokens"] == 5 * 2 * len(expected)


async def test_prompt_token_ids_win(front_end: FrontEnd) -> None:
    await front_end.complete(prompt_token_ids=[5, 6])
    assert front_end.submit.prompts == ((5, 6),)
    await front_end.post("/v1/chat/completions", {"prompt_token_ids": [5, 6]})
    assert front_end.submit.prompts == ((5, 6),)
    response = await front_end.chat(prompt_token_ids=[999])
    assert response.json()["error"]["param"] == "prompt_token_ids[0]"


async def test_chat_logprobs(make: Make) -> None:
    front_end = make(client=FakeClient(script=says("h\u00e9")))
    (choice,) = (await front_end.chat(logprobs=True, top_logprobs=2)).json()["choices"]
    first, second, third = choice["logprobs"]["content"]
    assert first == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "i", "logprob": -1.5, "bytes": [105]},
            {"token": "j", "logprob": -2.5, "bytes": [106]},
        ],
    }
    assert bytes(second["bytes"] + third["bytes"]).decode() == "\u00e9"
    (choice,) = (await front_end.chat(logprobs=True)).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    (choice,) = (await front_end.chat(logprobs=True, return_tokens_as_token_ids=True)).json()["choices"]
    assert choice["logprobs"]["content"][0]["token"] == "token_id:104"


@pytest.mark.parametrize("value", [None, False])
async def test_top_logprobs_need_logprobs(front_end: FrontEnd, value: bool | None) -> None:
    response = await front_end.chat(logprobs=value, top_logprobs=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
    response = await front_end.chat(logprobs=True, top_logprobs=21)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


async def test_completion_logprobs(front_end: FrontEnd) -> None:
    (choice,) = (await front_end.complete(logprobs=1)).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3, 4],
        "token_logprobs": [-0.5] * 5,
        "tokens": list("Hello"),
        "top_logprobs": [{chr(ord(c) + 1): -1.5, c: -0.5} for c in "Hello"],
    }
    (choice,) = (await front_end.complete(logprobs=0, return_tokens_as_token_ids=True)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord(c)}" for c in "Hello"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:72": -0.5}


async def test_no_infinity_in_json(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        for value in (float("-inf"), float("nan")):
            yield [Delta(0, [65], logprobs=rows([65], 2, value))]
        yield [Delta(0, finish_reason=FinishReason.LENGTH)]

    front_end = make(client=FakeClient(script=script))
    for response in (await front_end.complete(logprobs=1), await front_end.complete(logprobs=1, stream=True)):
        assert "-9999.0" in response.text
        assert not {"nan", "inf", "NaN", "Infinity"} & set(response.text.replace(":", ",").split(","))
    (choice,) = (await front_end.complete(logprobs=1)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_echo_repeats_the_prompt_with_its_logprobs(front_end: FrontEnd) -> None:
    body = (await front_end.complete(prompt=["ab", [99, 256, 100]], echo=True, n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["abHello"] * 2 + ["c<bos>dHello"] * 2
    assert front_end.submit.params.prompt_logprobs is None
    (choice,) = (await front_end.complete(prompt="abc", echo=True, logprobs=1)).json()["choices"]
    assert front_end.submit.params.prompt_logprobs == 1
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("abcHello")
    assert logprobs["text_offset"] == list(range(8))
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 7
    assert logprobs["top_logprobs"][:2] == [None, {"c": -1.5, "b": -0.5}]
    assert "prompt_logprobs" not in choice


async def test_echo_in_chat_continues_the_assistant_s_message(front_end: FrontEnd) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    body = (await front_end.chat(messages=messages, continue_final_message=True, echo=True)).json()
    assert body["choices"][0]["message"]["content"] == "Well, Hello"
    body = (await front_end.chat(messages=messages[:1], echo=True)).json()
    assert body["choices"][0]["message"]["content"] == "Hello"


async def test_prompt_logprobs_in_both_routes(front_end: FrontEnd) -> None:
    (choice,) = (await front_end.complete(prompt="abc", prompt_logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 1, "decoded_token": "c"},
        },
        {
            "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "100": {"logprob": -1.5, "rank": 1, "decoded_token": "d"},
        },
    ]
    body = (await front_end.chat(prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == len(front_end.submit.prompts[0])
    assert body["prompt_logprobs"][0] is None


async def test_token_ids_on_request(front_end: FrontEnd) -> None:
    (choice,) = (await front_end.complete(return_token_ids=True)).json()["choices"]
    assert choice["prompt_token_ids"] == list(b"Hi")
    assert choice["token_ids"] == list(b"Hello")
    body = (await front_end.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == list(front_end.submit.prompts[0])
    assert body["choices"][0]["token_ids"] == list(b"Hello")


async def test_cached_tokens_are_reported_once_per_prompt(make: Make) -> None:
    def script(submit: Submit) -> Iterable[list[Delta]]:
        num_choices = len(submit.prompts) * submit.params.n
        yield [
            Delta(choice, [65], num_cached_tokens=2, finish_reason=FinishReason.LENGTH) for choice in range(num_choices)
        ]

    front_end = make(client=FakeClient(script=script))
    usage = (await front_end.complete(prompt=["abc", "abd"], n=3)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert usage["prompt_tokens"] == 6


async def test_stop_reasons(make: Make) -> None:
    front_end = make(client=FakeClient(script=says("one END two")))
    (choice,) = (await front_end.complete(stop="END")).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "END")
    (choice,) = (await front_end.complete(stop=["END"], include_stop_str_in_output=True)).json()["choices"]
    assert choice["text"] == "one END"

    def by_token(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, [65, 66], finish_reason=FinishReason.STOP, stop_token_id=66)]

    front_end = make(client=FakeClient(script=by_token))
    (choice,) = (await front_end.complete(stop_token_ids=[66])).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("A", "stop", 66)


async def test_every_sampling_field_reaches_the_engine(front_end: FrontEnd) -> None:
    fields = {
        "n": 2, "max_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 11, "min_p": 0.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "repetition_penalty": 1.1, "seed": 99,
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    await front_end.complete(
        **fields, stop=["x", "y"], stop_token_ids=[4], logit_bias={"5": -3}, bad_words_token_ids=[8, 9], logprobs=2
    )
    params = front_end.submit.params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop == ("x", "y")
    assert params.stop_token_ids == (4,)
    assert params.logit_bias == {5: -3.0}
    assert params.bad_words_token_ids == ((8,), (9,))
    assert params.logprobs == 2


async def test_request_fields_reach_the_engine(front_end: FrontEnd) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    body = {"prompt": "x", "priority": -4, "cache_salt": "mine", "timeout_s": 2.5}
    await front_end.post("/v1/completions", body, headers={"traceparent": trace})
    submit = front_end.submit
    assert (submit.priority, submit.cache_salt, submit.timeout_s, submit.trace_parent) == (-4, "mine", 2.5, trace)
    await front_end.post("/v1/completions", body, headers={"traceparent": "junk"})
    assert front_end.submit.trace_parent is None


async def test_max_tokens_of_both_routes(front_end: FrontEnd) -> None:
    await front_end.complete()
    assert front_end.submit.params.max_tokens == 16
    await front_end.chat()
    assert front_end.submit.params.max_tokens == 256 - len(front_end.submit.prompts[0])
    await front_end.chat(max_tokens=50, max_completion_tokens=5)
    assert front_end.submit.params.max_tokens == 5
    for fields, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -5, "max_tokens": 3}, "max_completion_tokens"),
    ):
        response = await front_end.chat(**fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_null_stands_for_the_default(front_end: FrontEnd) -> None:
    names = (
        "n",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "logit_bias",
        "stream",
        "stream_options",
        "max_tokens",
        "user",
    )
    assert (await front_end.chat(**dict.fromkeys(names))).status_code == 200
    params = front_end.submit.params
    assert (params.n, params.temperature, params.top_p, params.stop) == (1, 1.0, 1.0, ())


async def test_tools_are_rendered_and_the_answer_is_plain(make: Make) -> None:
    from headrace.processing.chat_template import ChatTemplate
    from headrace.testing.bytes import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ChatTemplate("{{ tools[0].function.name }}:{{ messages[0].content }}", special_tokens={})
    front_end = make(tokenizer=tokenizer)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    for choice in ({}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        response = await front_end.chat(tools=tools, **choice)
        assert response.json()["choices"][0]["message"]["content"] == "Hello"
        assert bytes(front_end.submit.prompts[0]).decode() == "look_up:Hi"


async def test_reasoning_effort_reaches_the_template(make: Make) -> None:
    from headrace.processing.chat_template import ChatTemplate
    from headrace.testing.bytes import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ChatTemplate("{{ reasoning_effort }}/{{ mood }}", special_tokens={})
    front_end = make(tokenizer=tokenizer)
    await front_end.chat(reasoning_effort="low", chat_template_kwargs={"mood": "calm"})
    assert bytes(front_end.submit.prompts[0]).decode() == "low/calm"
    assert (await front_end.chat(reasoning_effort="wild")).status_code == 400


async def test_chat_without_a_template(make: Make, without_template: Tokenizer) -> None:
    front_end = make(tokenizer=without_template)
    response = await front_end.chat()
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]
    assert (await front_end.complete()).status_code == 200
