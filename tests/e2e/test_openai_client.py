"""The official `openai` client against a real server of the tiny model: supervisor, front end and engine processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.testing.server import RunningServer

USER, ADMIN = "user-key", "admin-key"
MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "Name the rivers of the north."}]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[RunningServer]:
    options = ["--backend", "reference-exact", "--num-kv-blocks", "512", "--served-model-name", MODEL]
    keys = ["--api-key", USER, "--admin-key", ADMIN]
    with RunningServer([str(tiny_model), *options, *keys]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=USER, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=USER, max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_says_what_the_plain_reply_says(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0.9, "seed": 7, "n": 2,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    plain = client.chat.completions.create(**options)
    texts, finishes, rows = ["", ""], [None, None], ([], [])  # type: ignore[var-annotated]
    usage = None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            rows[choice.index].extend(choice.logprobs.content if choice.logprobs and choice.logprobs.content else [])
    assert texts == [choice.message.content for choice in plain.choices]
    assert finishes == [choice.finish_reason for choice in plain.choices]
    assert list(rows) == [choice.logprobs.content for choice in plain.choices if choice.logprobs]
    assert usage is not None
    assert plain.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (plain.usage.prompt_tokens, plain.usage.completion_tokens)
    assert texts[0] != texts[1], "choice i uses seed + i"


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 by itself."""
    source = ["the river in the north", "a mountain"]
    coded = client.embeddings.create(model=MODEL, input=source)
    plain = client.embeddings.create(model=MODEL, input=source, encoding_format="float")
    ids = client.embeddings.create(model=MODEL, input=[list(text.encode()) for text in source])
    vectors = [each.embedding for each in coded.data]
    assert vectors == [each.embedding for each in plain.data] == [each.embedding for each in ids.data]
    assert [each.index for each in coded.data] == [0, 1]
    assert all(sum(number**2 for number in vector) == pytest.approx(1, abs=1e-5) for vector in vectors)
    assert coded.usage.prompt_tokens == coded.usage.total_tokens == sum(map(len, source))
    cut = client.embeddings.create(model=MODEL, input=source[0], dimensions=8, extra_body={"pooling": "mean"})
    assert len(cut.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError, match="dimensions must be"):
        client.embeddings.create(model=MODEL, input=source, dimensions=10**6)


async def collect(client: openai.AsyncOpenAI, number: int) -> tuple[str, list[float], str | None]:
    """One of sixteen different streams, greedy and seeded ones, short and long prompts."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=f"Story {number}: " + "once upon a time " * number,
        max_tokens=24 + number,
        temperature=0.0 if number % 2 else 1.0,
        seed=number,
        logprobs=1,
        stream=True,
    )
    text, logprobs, finish = "", [], None
    async for chunk in stream:
        for choice in chunk.choices:
            assert finish is None, "nothing comes after the finish"
            text += choice.text
            finish = choice.finish_reason
            logprobs += choice.logprobs.token_logprobs or [] if choice.logprobs else []
    return text, logprobs, finish  # type: ignore[return-value]


async def test_sixteen_streams_at_once_are_bitwise_their_own_run_alone(async_client: openai.AsyncOpenAI) -> None:
    alone = [await collect(async_client, number) for number in range(16)]
    together = await asyncio.gather(*(collect(async_client, number) for number in range(16)))
    assert all(finish in ("stop", "length") for _, _, finish in together)
    assert len({text for text, _, _ in together}) > 8, "different streams, or this shows nothing"
    assert together == alone


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=5, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model=MODEL, prompt="Two", max_tokens=5, temperature=0)
    assert reply.choices[2].text == reply.choices[3].text == alone.choices[0].text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 2 * alone.usage.prompt_tokens  # type: ignore[union-attr]


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="abc", max_tokens=4, temperature=0, logprobs=3, echo=True)
    (choice,) = reply.choices
    assert choice.text.startswith("abc")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert reply.usage is not None
    assert len(logprobs.token_logprobs) == reply.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    for value, top in zip(logprobs.token_logprobs[-4:], logprobs.top_logprobs[-4:], strict=True):
        assert value == max(top.values()), "greedy takes the most likely token"


def test_stop_strings(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "temperature": 0}
    full = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    stop = full[10:13]
    cut = full[: full.index(stop)]
    (choice,) = client.completions.create(**options, stop=[stop], extra_body={"ignore_eos": True}).choices
    assert (choice.text, choice.finish_reason) == (cut, "stop")
    stream = client.completions.create(**options, stop=stop, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in stream) == cut


def test_cached_tokens_of_a_shared_prefix(client: openai.OpenAI) -> None:
    shared = "A long and shared beginning of many requests. " * 8
    for number, least in ((1, 0), (2, 256)):
        reply = client.completions.create(model=MODEL, prompt=f"{shared}{number}", max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= least
        assert cached < reply.usage.prompt_tokens


def test_errors_are_the_client_s_own_exceptions(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature", "invalid_value", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-x", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.APIStatusError) as late:
        client.with_options(timeout=30).completions.create(
            model=MODEL, prompt="x", max_tokens=1500, extra_body={"timeout_s": 0.001, "ignore_eos": True}
        )
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")  # type: ignore[attr-defined]
    assert server.get("/health_generate").status_code == 200


def test_request_ids(client: openai.OpenAI) -> None:
    reply = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "my-own"}
    )
    assert reply.headers["x-request-id"] == "my-own"
    assert reply.parse().id == "cmpl-my-own"


def test_closing_a_stream_frees_its_request(client: openai.OpenAI, server: RunningServer) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=1500, n=4, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 5
    while (load := server.get("/v1/load").json())["running"] or load["waiting"]:
        assert time.monotonic() < until, load
        time.sleep(0.02)
