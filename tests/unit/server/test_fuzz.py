"""Each field with what nobody should send, on a real engine core: never a 5xx, always a body, and the engine lives."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx
import pytest

from headrace.server.protocol.chat import ChatCompletionRequest
from headrace.server.protocol.completions import CompletionRequest

VALUES: list[str] = [  # as JSON text: some of it no Python value would become
    "null", "true", "false", "0", "1", "-1", "2", "0.5", "-0.5", "1e300", "-1e300", "1e-300", "1e999", "NaN",
    "Infinity", "-Infinity", "2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1" + "0" * 400, '""', '"x"', '"5"', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00\\u200d"',
    '"' + "y" * 5000 + '"', "[]", "[[]]", "[[[]]]", "[null]", "[true]", "[-1]", "[0]", "[97, 98]", "[999999]", "[1e9]",
    "[0.5]", '[""]', '["x"]', '["x", 5]', "[[97], [98]]", '[{}]', "{}", '{"a": 1}', '{"5": 1}', '{"-5": 1}',
    '{"5": 1e300}', '{"999999": 1}', '{"5": "x"}', '{"type": 5}', '{"type": "function"}',
]  # fmt: skip

MODES = ("false", "true")  # of stream; the number of values is odd, so a field meets both
MESSAGES = '[{"role": "user", "content": "Hi"}]'


def body_of(fields: dict[str, str]) -> bytes:
    return ("{" + ",".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


async def send(http: httpx.AsyncClient, path: str, fields: dict[str, str]) -> None:
    response = await http.post(path, content=body_of(fields))
    told: Any = (path, {name: value[:60] for name, value in fields.items()}, response.text[:300])
    allowed = (200, 400, 404, 504) if "timeout_s" in fields else (200, 400, 404)  # a deadline may be over at once
    assert response.status_code in allowed, told
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"], told
        assert set(error) == {"message", "type", "param", "code"}, told
    elif "data: " in response.text:
        assert response.text.endswith("data: [DONE]\n\n"), told
        assert '"error"' not in response.text, told


async def test_completion_fields(http: httpx.AsyncClient) -> None:
    base = {"prompt": '"Hi"', "max_tokens": "3", "seed": "1"}
    for number, (name, value) in enumerate(product(CompletionRequest.model_fields, VALUES)):
        await send(http, "/v1/completions", {**base, "stream": MODES[number % 2], name: value})
    assert (await http.get("/health_generate")).status_code == 200


async def test_chat_fields(http: httpx.AsyncClient) -> None:
    base = {"messages": MESSAGES, "max_tokens": "3", "seed": "1", "logprobs": "true"}
    for number, (name, value) in enumerate(product(ChatCompletionRequest.model_fields, VALUES)):
        await send(http, "/v1/chat/completions", {**base, "stream": MODES[number % 2], name: value})
    assert (await http.get("/health_generate")).status_code == 200


def test_a_field_meets_both_modes() -> None:
    assert len(VALUES) % 2 == 1


async def test_parts_of_messages(http: httpx.AsyncClient) -> None:
    for value in VALUES:
        for message in (
            value,
            f'{{"role": {value}, "content": "x"}}',
            f'{{"role": "user", "content": {value}}}',
            f'{{"role": "user", "content": [{value}]}}',
            f'{{"role": "user", "content": [{{"type": "text", "text": {value}}}]}}',
            f'{{"role": "user", "content": [{{"type": {value}, "text": "x"}}]}}',
            f'{{"role": "assistant", "content": null, "tool_calls": {value}}}',
            f'{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {value}}}}}]}}',
            f'{{"role": "user", "content": "x", "name": {value}, "reasoning_content": {value}}}',
        ):
            await send(http, "/v1/chat/completions", {"messages": f"[{message}]", "max_tokens": "2"})
    assert (await http.get("/health_generate")).status_code == 200


async def test_other_bodies(http: httpx.AsyncClient) -> None:
    for value in VALUES:
        for path, name in (
            ("/tokenize", "prompt"),
            ("/tokenize", "messages"),
            ("/tokenize", "return_token_strs"),
            ("/detokenize", "tokens"),
            ("/detokenize", "skip_special_tokens"),
            ("/v1/control/abort", "request_ids"),
            ("/v1/control/abort", "request_id"),
            ("/v1/control/abort", "all"),
        ):
            await send(http, path, {name: value})


@pytest.mark.parametrize("seed", ["9223372036854775807", "9223372036854775806", "0"])
async def test_seeds_at_the_border_with_several_choices(http: httpx.AsyncClient, seed: str) -> None:
    response = await http.post(
        "/v1/completions", content=body_of({"prompt": '["a", "b"]', "n": "5", "seed": seed, "max_tokens": "3"})
    )
    assert response.status_code == 200
