"""Each field of /generate, /chat/, /inference/v1/generate, /v1/messages and /v1/responses with what nobody should send,
on a real engine core: never a 5xx, always an error body, and the engine lives."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from headrace.server.dialects.trl_generate import ChatBody, GenerateBody
from headrace.server.protocol.common import GenerationRequest, RequestModel
from headrace.server.protocol.generate import GenerateRequest, GenerateSampling
from headrace.server.protocol.messages import MessagesRequest
from headrace.server.protocol.responses import ResponsesRequest
from headrace.server.protocol.token_generate import TokenGenerateRequest, TokenSampling

VALUES = [  # as JSON text
    "null", "true", "false", "0", "-1", "2", "0.5", "1e300", "NaN", "2147483648", "9223372036854775808",
    "1" + "0" * 400, '""', '"x"', '"\\u0000"', '"\\ud800"', '"' + "y" * 5000 + '"', "[]", "[[]]", "[null]", "[-1]",
    "[97, 98]", "[999999]", '["x", 5]', "[[97], [98]]", "[{}]", "{}", '{"a": 1}', '{"type": 5}', '{"type": "text"}',
    '[{"type": "text", "text": 5}]', '[{"role": "user", "content": [{"type": "text"}]}]',
    '[{"type": "function", "name": 5}]',
]  # fmt: skip
CHAT = '[{"role": "user", "content": "Hi"}]'


def own(model: type[RequestModel]) -> list[str]:
    """The fields that only this body has."""
    return [name for name in model.model_fields if name not in GenerationRequest.model_fields]


def bodies() -> Iterator[tuple[str, str]]:
    """(path, body)"""

    def inside(outer: str, fields: list[str]) -> Iterator[str]:
        for name in fields:
            for value in VALUES:
                yield outer % f'"{name}": {value}'

    def beside(base: dict[str, str], fields: list[str]) -> Iterator[str]:
        for name in fields:
            for number, value in enumerate(VALUES):
                given = {"stream": ("false", "true")[number % 2], **base, name: value}
                yield "{" + ", ".join(f'"{key}": {text}' for key, text in given.items()) + "}"

    scored = {"text": '"Hi"', "sampling_params": '{"max_new_tokens": 2}', "return_logprob": "true"}
    groups = {
        "/generate": (
            *beside(scored, list(GenerateRequest.model_fields)),
            *inside('{"text": "Hi", "sampling_params": {"max_new_tokens": 2, %s}}', [*own(GenerateSampling), "stop"]),
        ),
        "/generate/": inside('{"prompts": ["Hi"], "max_tokens": 2, %s}', own(GenerateBody)),
        "/chat/": inside(f'{{"messages": [{CHAT}], "max_tokens": 2, %s}}', own(ChatBody)),
        "/inference/v1/generate": (
            *beside({"token_ids": "[5]"}, list(TokenGenerateRequest.model_fields)),
            *inside('{"token_ids": [5], "sampling_params": {"max_tokens": 2, %s}}', own(TokenSampling)),
        ),
        "/v1/messages": (
            *beside({"messages": CHAT, "max_tokens": "2"}, list(MessagesRequest.model_fields)),
            *inside('{"messages": [{"role": "user", %s}], "max_tokens": 2}', ["content", "role"]),
            *inside('{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", %s}]}], '
                    '"max_tokens": 2}', ["input", "name", "type"]),
        ),
        "/v1/responses": (
            *beside({"input": '"Hi"', "max_output_tokens": "2"}, list(ResponsesRequest.model_fields)),
            *inside('{"input": [{%s}], "max_output_tokens": 2}', ["type", "role", "content"]),
            *inside('{"input": [{"type": "reasoning", %s}], "max_output_tokens": 2}', ["content", "summary"]),
        ),
    }  # fmt: skip
    for path, texts in groups.items():
        for text in texts:
            yield path, text


@pytest.mark.timeout(120)
async def test_every_field(http: httpx.AsyncClient) -> None:
    for path, body in bodies():
        response = await http.post(path, content=body)
        told = (path, body[:200], response.text[:300])
        assert response.status_code in (200, 400, 404), told
        if response.status_code != 200:
            assert response.json()["error"]["message"], told
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert "server_error" not in response.text, told
            assert "api_error" not in response.text, told
    assert (await http.get("/health_generate")).status_code == 200
