"""Every field of every route that takes a body, found by looking at the application itself, with what nobody should
send: the control routes and those of the dialects on a fake engine, strings of 10 MB on the mock engine.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
from fastapi.routing import APIRoute
from pydantic.fields import FieldInfo

from headrace.server.protocol.chat import ChatCompletionRequest
from headrace.server.protocol.common import RequestModel
from headrace.server.protocol.completions import CompletionRequest
from headrace.server.protocol.embeddings import EmbeddingRequest
from headrace.server.protocol.generate import GenerateRequest, GenerateSampling
from headrace.server.protocol.messages import MessagesRequest
from headrace.server.protocol.responses import ResponsesRequest
from headrace.server.protocol.token_generate import TokenGenerateRequest, TokenSampling
from headrace.server.routes import all_routers
from headrace.testing.dialects import dialect_front_end

VALUES = [  # as JSON text
    "null", "true", "-1", "0.5", "1e999", "9223372036854775808", "1" + "0" * 400, '""', '"x"', '"\\u0000"', "[null]",
    '["\\udc00"]', "[{}]", "{}", '{"kind": "path"}', '"' + "9" * 5000 + '"',
]  # fmt: skip
FULL = {  # bodies that are right, by fields that must be there together
    "master_address": "10.0.0.1", "master_port": 5, "world_size": 2, "rank_offset": 1, "names": ["a"],
    "dtypes": ["float32"], "shapes": [[2]], "model_path": "/m", "path": "/m", "name": "a", "new_version": "1",
    "host": "h", "port": 5, "version": "1", "level": "info", "method": "check_health", "dtype": "float32",
    "client_device_uuid": "", "shape": [2], "init_info": {},
    "source": {"kind": "path", "path": "/m"}, "update_info": {},
}  # fmt: skip
MEGABYTES_10 = 10_000_000


def routes() -> Iterator[tuple[str, str, list[type[RequestModel]]]]:
    """(method, path, the models of bodies that its function names)"""
    for router in all_routers():
        for route in router.routes:
            assert isinstance(route, APIRoute)
            names = inspect.getclosurevars(route.endpoint)
            named = {**names.globals, **names.nonlocals}.values()
            models = [it for it in named if isinstance(it, type) and issubclass(it, RequestModel)]
            for method in sorted(route.methods - {"GET", "HEAD", "DELETE"}):
                yield method, route.path.replace("{operation_id}", "op-1").replace("{response_id}", "r"), models


def bodies(models: Iterable[type[RequestModel]]) -> Iterator[bytes]:
    for model in models:
        right = {name: json.dumps(FULL[name]) for name in model.model_fields if name in FULL}
        for name in model.model_fields:
            for value in VALUES:
                fields = {**right, name: value}
                yield ("{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}").encode()
    yield from (b"", b"null", b"[]", b"5", b"{", b'"\xff"', b'{"a":' * 5000, b"[" * 50_000)


async def test_every_field_of_every_control_route() -> None:
    front_end = dialect_front_end(allow_pickles=True)
    probe = {"prompt": "Hi", "max_tokens": 3}
    before = (await front_end.complete(**probe)).json()["choices"]
    num_accepted = num_models = 0
    for method, path, models in routes():
        if path.startswith(("/v1/chat", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/chat")):
            continue
        num_models += len(models)
        for body in bodies(models):
            response = await front_end.http.request(method, path, content=body)
            told = (method, path, body[:300], response.text[:300])
            assert response.status_code < 500, told
            num_accepted += response.status_code < 300
            if response.status_code >= 400:
                error = response.json()  # FastDeploy's routes have their own names for it
                assert error.get("msg") or error.get("error_message") or error["error"]["message"], told
    assert num_models > 50, "the models are found by what the functions name"
    assert num_accepted > 100, "bodies that are right but for one field must often pass"
    assert (await front_end.complete(**probe)).json()["choices"] == before
    await front_end.close()


def may_be_text(field: FieldInfo) -> bool:
    """A number or flag is refused by its type, which the other tests see to."""
    return any(kind in str(field.annotation) for kind in ("str", "Any"))


async def test_ten_megabytes_in_each_field(http: httpx.AsyncClient) -> None:
    """What the field is no place for is refused; nothing comes near a second, and nobody else notices."""
    huge = b'"' + b"y" * MEGABYTES_10 + b'"'
    chat = '"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2'
    for path, base, models in (
        ("/v1/completions", '"prompt": "Hi", "max_tokens": 2', [CompletionRequest]),
        ("/v1/embeddings", '"input": "Hi"', [EmbeddingRequest]),
        ("/v1/chat/completions", chat, [ChatCompletionRequest]),
        ("/v1/messages", chat, [MessagesRequest]),
        ("/v1/responses", '"input": "Hi", "max_output_tokens": 2', [ResponsesRequest]),
        ("/generate", '"text": "Hi"', [GenerateRequest]),
        ("/generate", '"text": "Hi", "sampling_params": {"max_new_tokens": 2, %s}', [GenerateSampling]),
        ("/inference/v1/generate", '"token_ids": [5]', [TokenGenerateRequest]),
        ("/inference/v1/generate", '"token_ids": [5], "sampling_params": {"max_tokens": 2, %s}', [TokenSampling]),
    ):
        for name in [name for model in models for name, field in model.model_fields.items() if may_be_text(field)]:
            before, _, after = (base if "%s" in base else base + ", %s").encode().partition(b"%s")
            body = b'{%b"%b": %b%b}' % (before, name.encode(), huge, after)
            response = await http.post(path, content=body)
            told = (path, name, response.text[:300])
            assert response.status_code in (200, 400, 404), told
            assert len(response.text) < 20_000, told
    assert (await http.get("/health_generate")).status_code == 200


def test_the_models_of_the_inference_routes_are_all_here() -> None:
    found = {model.__name__: path for _, path, models in routes() for model in models}
    for model in (ChatCompletionRequest, CompletionRequest, MessagesRequest, ResponsesRequest, GenerateRequest):
        assert model.__name__ in found
    unseen = [path for method, path, models in routes() if not models]
    told: Any = "a route that reads no model: does it take a body at all?"
    assert len(unseen) < 40, (told, unseen)
