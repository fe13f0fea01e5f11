"""/v1/embeddings on the mock engine: inputs, formats, lengths, refusals, usage, and what ends a request early."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.client.base import Delta
from headrace.config.options import EngineConfig, ModelConfig, ServeConfig
from headrace.processing.embedding import finished
from headrace.server.protocol.embeddings import EmbeddingRequest
from headrace.testing.echo import EMBEDDING_SIZE, echo_embedding
from headrace.testing.echo_app import MAX_MODEL_LEN, echo_app
from headrace.testing.front_end import INFO, FrontEnd
from headrace.types import POOLINGS, FinishReason

Make = Callable[..., FrontEnd]


async def embed(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def expected(text: str | list[int], pooling: str = "last", dimensions: int | None = None) -> list[float]:
    ids = list(text.encode()) if isinstance(text, str) else text
    numbers: list[float] = finished(echo_embedding(ids, pooling).tobytes(), dimensions, is_normalised=True).tolist()
    return numbers


async def test_a_text(http: httpx.AsyncClient) -> None:
    reply = await embed(http, input="hello", model="echo", user="me", request_id="mine")
    assert (reply["object"], reply["model"], reply["id"]) == ("list", "echo", "embd-mine")
    assert reply["data"] == [{"object": "embedding", "index": 0, "embedding": expected("hello")}]
    details = {"cached_tokens": 0}
    assert reply["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": details}


@pytest.mark.parametrize("source", [["ab", "c", "ab"], [[97, 98], [99], [97, 98]]])
async def test_several_come_in_their_order(http: httpx.AsyncClient, source: Any) -> None:
    reply = await embed(http, input=source, pooling="mean")
    assert [each["index"] for each in reply["data"]] == [0, 1, 2]
    assert [each["embedding"] for each in reply["data"]] == [expected(text, "mean") for text in ("ab", "c", "ab")]
    assert reply["usage"]["total_tokens"] == 5


async def test_token_ids_and_a_conversation(http: httpx.AsyncClient) -> None:
    assert (await embed(http, input=[5, 6, 7]))["data"][0]["embedding"] == expected([5, 6, 7])
    messages = [{"role": "user", "content": "Hi"}]
    told = (await http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()["tokens"]
    reply = await embed(http, messages=messages)
    assert reply["data"][0]["embedding"] == expected(told)
    assert reply["usage"]["prompt_tokens"] == len(told)


async def test_base64_holds_the_same_numbers(http: httpx.AsyncClient) -> None:
    source = ["one", "another"]
    numbers = await embed(http, input=source, encoding_format="float")
    coded = await embed(http, input=source, encoding_format="base64", embed_dtype="float32", endianness="little")
    for plain, other in zip(numbers["data"], coded["data"], strict=True):
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == plain["embedding"]


async def test_length_and_size(http: httpx.AsyncClient) -> None:
    raw = (await embed(http, input="abcd", pooling="mean", normalize=False))["data"][0]["embedding"]
    assert raw == echo_embedding(list(b"abcd"), "mean").tolist()
    whole = (await embed(http, input="abcd", dimensions=EMBEDDING_SIZE, pooling="mean"))["data"][0]["embedding"]
    assert whole == expected("abcd", "mean")
    cut = (await embed(http, input="abcd", dimensions=3, pooling="mean"))["data"][0]["embedding"]
    assert cut == expected("abcd", "mean", 3)
    assert np.linalg.norm(cut) == pytest.approx(1)


@pytest.mark.parametrize(("pooled", "is_normalised", "result"), [
    ([3.0, 4.0, 12.0], True, [3 / 13, 4 / 13, 12 / 13]),
    ([0.0, 0.0, 0.0], True, [0.0, 0.0, 0.0]),
    ([1e38, 1e38, 0.0], True, [0.5**0.5, 0.5**0.5, 0.0]),
    ([3.0, 4.0, 12.0], False, [3.0, 4.0, 12.0]),
])  # fmt: skip
def test_scaling(pooled: list[float], is_normalised: bool, result: list[float]) -> None:
    vector = finished(np.array(pooled, np.float32).tobytes(), None, is_normalised=is_normalised)
    assert vector.dtype == np.float32
    np.testing.assert_allclose(vector, result, rtol=1e-6)


async def test_long_inputs(http: httpx.AsyncClient) -> None:
    text = "x" * (MAX_MODEL_LEN - 2) + "yz"
    assert (await embed(http, input=text))["usage"]["prompt_tokens"] == MAX_MODEL_LEN, "an embedding needs no more room"
    for source in (text + "!", [1] * (MAX_MODEL_LEN + 1), ["a", text * 99]):
        response = await http.post("/v1/embeddings", json={"input": source})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"].startswith("input")
    for source in (text * 99, list((text * 99).encode()), [text + "yz", "yz"]):
        for kept in (2, -1):
            reply = await embed(http, input=source, truncate_prompt_tokens=kept)
            assert reply["data"][-1]["embedding"] == expected("yz"), "the last tokens are kept"
            assert reply["usage"]["prompt_tokens"] == (
                2 * len(reply["data"]) if kept == 2 else MAX_MODEL_LEN + 2 * (len(reply["data"]) - 1)
            )


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [1, "a"]}, "input[1]"),
    ({"input": [[]]}, "input"),
    ({"input": [260]}, "input[0]"),
    ({"input": ["a"] * 1025}, "input"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
    ({"input": "a", "dimensions": True}, "dimensions"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
    ({"input": "a", "timeout_s": 0}, "timeout_s"),
    ({"input": "a", "priority": 2**40}, "priority"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": "a", "prompt_embeds": "x"}, "prompt_embeds"),
    ({"input": "a", "model": "other"}, "model"),
])  # fmt: skip
async def test_refusals(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/embeddings", json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


async def test_fields_of_other_routes_are_named_in_a_header(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/embeddings", json={"input": "a", "n": 3, "stream": True, "tools": []})
    assert response.status_code == 200
    assert response.headers["X-Headrace-Unknown-Fields"] == "n,stream,tools"


def test_the_ways_of_pooling_are_the_same_everywhere() -> None:
    (option,) = [field for field in dataclasses.fields(ModelConfig) if field.name == "pooling"]
    told = EmbeddingRequest.model_json_schema()["properties"]["pooling"]["anyOf"][0]["enum"]
    assert tuple(option.metadata["choices"]) == tuple(told) == POOLINGS


async def test_the_server_says_how_to_pool() -> None:
    config = ServeConfig(engine=EngineConfig(model=ModelConfig(pooling="mean")))
    async with echo_app(config) as http:
        assert (await embed(http, input="abcd"))["data"][0]["embedding"] == expected("abcd", "mean")
        assert (await embed(http, input="abcd", pooling="last"))["data"][0]["embedding"] == expected("abcd")
        metrics = (await http.get("/metrics")).text
        assert 'finished_reason="stop"' in metrics


async def test_beside_generation_and_in_small_steps() -> None:
    async with echo_app(max_num_seqs=4) as http:
        texts = [f"text {n} " * (n + 1) for n in range(20)]
        generation = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 50, "ignore_eos": True})
        replies = await asyncio.gather(generation, embed(http, input=texts), embed(http, input=texts, pooling="mean"))
        assert replies[0].json()["usage"]["completion_tokens"] == 50
        for reply, pooling in zip(replies[1:], ("last", "mean"), strict=True):
            assert [each["embedding"] for each in reply["data"]] == [expected(text, pooling) for text in texts]


async def test_a_deadline(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/embeddings", json={"input": "a", "timeout_s": 1e-9})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_what_a_trainer_ends_is_an_error(make: Make) -> None:
    """A half embedding is of no use, unlike a half text."""
    front_end = make()
    front_end.client.info = replace(INFO, embedding_size=4)
    front_end.client.script = lambda _: [[Delta(0, finish_reason=FinishReason.ABORT)]]
    response = await front_end.post("/v1/embeddings", {"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")


async def test_a_model_that_gives_none(front_end: FrontEnd) -> None:
    response = await front_end.post("/v1/embeddings", {"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_embeddings")
