"""The default model through the whole server: ready in time, right answers, a cached prefix that saves time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from headrace import LLM, SamplingParams
from headrace.testing.server import RunningServer

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunningServer]:
    begin = time.perf_counter()
    with RunningServer([str(smollm2), "--served-model-name", "smollm2", "--kv-cache-memory", "512MiB"]) as running:
        assert running.get("/readyz").status_code == 200
        assert time.perf_counter() - begin < 5.0, "from the command to ready"
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_capital_of_france(client: OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    reply = client.chat.completions.create(model="smollm2", messages=question, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


def test_the_curl_that_the_server_prints_works(server: RunningServer) -> None:
    line = next(line for line in server.output if line.startswith("Try: curl"))
    body = line[line.index("-d '") + 4 : line.rindex("'")]
    url = line.split()[2]
    reply = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=60.0)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"]


def test_a_shared_prefix_is_reported_and_saves_time(client: OpenAI) -> None:
    prefix = "The river carries water to the wheel, and the wheel turns the stone. " * 40

    def first_token_s(question: str) -> tuple[float, int]:
        begin = time.perf_counter()
        stream = client.completions.create(
            model="smollm2",
            prompt=prefix + question,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        first_s, cached = 0.0, 0
        for chunk in stream:
            if chunk.choices and not first_s:  # its text may be empty: an end at once is an answer too
                first_s = time.perf_counter() - begin
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return first_s, cached

    cold_s, cold_cached = first_token_s("What does the stone do?")
    warm_s, warm_cached = first_token_s("Who built the mill?")
    assert cold_cached == 0
    assert warm_cached >= 500
    assert warm_s < cold_s / 2


def test_the_primary_colours(gemma3: Path) -> None:
    with LLM(str(gemma3), kv_cache_memory="256MiB", max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        text = llm.generate("The three primary colours are", params)[0].outputs[0].text
    for colour in ("red", "yellow", "blue"):
        assert colour in text
