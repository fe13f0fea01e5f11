"""One bad or failing request hurts nobody else, and its sender always learns how it ended."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from headrace.server.body import UNKNOWN_FIELDS
from headrace.testing.echo_app import echo_app
from headrace.testing.front_end import FakeClient, FrontEnd, events, make_front_end, says
from headrace.types import FinishReason

FAILING = ord("!")  # whoever would sample it fails, as when a grammar's matcher refuses its token
SCORED = {"text": "Hi", "return_logprob": True}


async def test_a_sequence_that_fails_late_ends_its_stream_and_no_other() -> None:
    async with echo_app(fail_token_id=FAILING, step_delay_s=0.01) as http:

        async def ask(prompt: str, **fields: Any) -> httpx.Response:
            return await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, **fields})

        stream, plain, early, other = await asyncio.gather(
            ask("abc!", stream=True), ask("abc!"), ask("!abc", stream=True), ask("abcd", stream=True)
        )
        *chunks, error = events(stream)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
        assert error["error"]["type"] == "server_error"
        assert plain.status_code == early.status_code == 500, "before the first byte it is a status"
        assert events(other)[-1]["choices"][0]["finish_reason"] == "length"
        assert (await ask("abcd")).json()["choices"][0]["text"] == "abcdabcd"


async def test_aborting_what_is_gone_is_no_error() -> None:
    async with echo_app() as http:
        body = {"prompt": "Hi", "max_tokens": 2, "request_id": "once"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        for _ in range(3):
            reply = await http.post("/v1/control/abort", json={"request_ids": ["once", "never"]})
            assert (reply.status_code, reply.json()["aborted"]) == (200, 0)
        assert (await http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("ids", [[-1], [260], [2**31], [2**63], ["5"], [True], [[5], [6]], 5, "5"])
async def test_logprobs_of_tokens_that_are_none_are_refused(ids: Any) -> None:
    front_end = make_front_end(admission={"max_logprobs": -1})
    response = await front_end.post("/generate", {**SCORED, "token_ids_logprob": ids})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("token_ids_logprob")
    await front_end.close()


@pytest.mark.parametrize(
    "bias", ['{"-1": 1}', '{"260": 1}', '{"2147483648": 1}', '{"abc": 1}', '{"5": NaN}', '{"5": 1e999}']
)
async def test_biases_of_tokens_that_are_none_are_refused(front_end: FrontEnd, bias: str) -> None:
    content = f'{{"prompt": "Hi", "logit_bias": {bias}}}'
    response = await front_end.http.post("/v1/completions", content=content)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in ("logit_bias", "logit_bias.5", None)


async def test_the_route_of_token_ids_keeps_to_stop_strings() -> None:
    for stream in (False, True):
        front_end = make_front_end(client=FakeClient(script=says("one END two")))
        body = {"token_ids": [1, 2], "sampling_params": {"stop": ["END"], "max_tokens": 20}, "stream": stream}
        response = await front_end.post("/inference/v1/generate", body)
        choices = [frame["choices"][0] for frame in (events(response) if stream else [response.json()])]
        assert bytes(token_id for choice in choices for token_id in choice["token_ids"]) == b"one "
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "END")
        await front_end.close()


async def test_fields_in_the_wrong_object_are_reported(front_end: FrontEnd) -> None:
    body = {"token_ids": [1], "sampling_params": {"echo": True, "timeout_s": 3.0, "top_p": 0.5, "stream": None}}
    response = await front_end.post("/inference/v1/generate", body)
    assert response.status_code == 200
    assert response.headers[UNKNOWN_FIELDS] == "sampling_params.echo,sampling_params.timeout_s"


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/chat/completions", CHAT, ("usage", "prompt_tokens", "completion_tokens")),
        ("/v1/completions", {"prompt": "Hi"}, ("usage", "prompt_tokens", "completion_tokens")),
        ("/v1/responses", {"input": "Hi"}, ("usage", "input_tokens", "output_tokens")),
        ("/generate", {"text": "Hi"}, ("meta_info", "prompt_tokens", "completion_tokens")),
        ("/inference/v1/generate", {"token_ids": [1]}, ("usage", "prompt_tokens", "completion_tokens")),
    ],
)
async def test_usage_is_told_of_what_was_ended_early(path: str, body: Any, counts: tuple[str, str, str]) -> None:
    front_end = make_front_end(client=FakeClient(script=says("Hel", reason=FinishReason.ABORT)))
    reply = (await front_end.post(path, body)).json()
    usage, prompt, output = reply[counts[0]], counts[1], counts[2]
    assert (usage[prompt], usage[output]) == (len(front_end.submit.prompts[0]), 3)
    await front_end.close()


async def test_param_is_a_path_of_the_body_and_nothing_else(front_end: FrontEnd) -> None:
    for path, body, param in (
        ("/init_weights_update_group", {"master_address": "a", "master_port": [], "world_size": 2}, "master_port"),
        ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": 5}, "stream": True},
         "stream_options.include_usage"),
        ("/v1/completions", {"prompt": "Hi", "stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ("/v1/completions", {"prompt": "Hi", "guided_choice": ["a", 5]}, "guided_choice[1]"),
        ("/v1/control/set_version", {}, "version"),
    ):  # fmt: skip
        response = await front_end.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_integers_that_no_message_can_carry_are_refused(front_end: FrontEnd) -> None:
    body = {"master_address": "a", "master_port": 5, "world_size": 10**30}
    response = await front_end.post("/init_weights_update_group", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "world_size")
    assert "join_group" not in [operation for operation, _ in front_end.client.controlled.calls]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": "u" * 513}, "user"),
        ({"safety_identifier": "u" * 513}, "safety_identifier"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"key": "x" * 513}}, "metadata.key"),
    ],
)
async def test_what_every_event_repeats_is_short(front_end: FrontEnd, fields: dict[str, Any], param: str) -> None:
    response = await front_end.post("/v1/responses", {"input": "Hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
