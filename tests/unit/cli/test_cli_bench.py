"""The benchmarks' arithmetic with numbers worked out by hand, and their load against a fake server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.bench.load import Load, arrivals_of, prompts_of, run_round
from headrace.cli.bench.stats import Trial, percentile, spread, summarise


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


def test_gaps_are_per_token() -> None:
    one_each = Trial(0.0, chunk_s=[1.0, 1.5, 2.5], output_tokens=3)
    assert one_each.gaps_s == [0.5, 1.0]
    two_each = Trial(0.0, chunk_s=[1.0, 1.5, 2.5], output_tokens=5)
    assert two_each.gaps_s == [0.25, 0.5]
    assert Trial(0.0, chunk_s=[1.0], output_tokens=9).gaps_s == []


def test_summary() -> None:
    trials = [
        Trial(0.0, 1.0, 3.0, [1.0, 2.0, 3.0], prompt_tokens=10, output_tokens=3),
        Trial(1.0, 3.0, 5.0, [3.0, 5.0], prompt_tokens=20, output_tokens=2),
        Trial(0.0, None, 1.0, error="429: full"),
    ]
    summary = summarise(trials, 5.0)
    assert summary["num_failed"] == 1
    assert summary["failures"] == {"429: full": 1}
    assert summary["output_tokens_per_s"] == 1.0
    assert summary["total_tokens_per_s"] == 7.0
    assert summary["ttft_ms"]["p50"] == 1500.0
    assert summary["e2e_ms"]["mean"] == 3500.0
    assert summary["inter_token_ms"]["p50"] == 1000.0
    assert summarise(trials[2:], 1.0)["ttft_ms"] is None


def test_spread() -> None:
    assert spread([3.0]) == "3.0"
    assert spread([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0)"


def load(**changes: Any) -> Load:
    fields: dict[str, Any] = {
        "model": "m",
        "endpoint": "completions",
        "num_requests": 12,
        "concurrency": 3,
        "request_rate": None,
        "input_tokens": 5,
        "output_tokens": 2,
        "ignore_eos": True,
        "seed": 0,
    }
    return Load(**{**fields, **changes})


def test_prompts_are_a_function_of_the_seed() -> None:
    prompts = prompts_of(load())
    assert prompts == prompts_of(load())
    assert prompts != prompts_of(load(seed=1))
    assert len(set(prompts)) == 12
    assert {len(prompt.split()) for prompt in prompts} == {5}


def test_arrivals() -> None:
    assert arrivals_of(load()) == [0.0] * 12
    arrivals = arrivals_of(load(concurrency=None, request_rate=50.0, num_requests=2000))
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == 2000
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.15)  # exponential: its deviation is its mean


class FakeServer(httpx.AsyncBaseTransport):
    """Streams two chunks and usage; answers each third request with 429. Counts how many run at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_running = 0
        self.most_running = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        number = len(self.bodies)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.001)
        self.num_running -= 1
        if number % 3 == 0:
            return httpx.Response(429, json={"error": {"message": "full"}})
        choice = {"delta": {"content": "x"}} if "messages" in self.bodies[-1] else {"text": "x"}
        chunks = [{"choices": [choice]}, {"choices": [choice]}]
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage]))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_round(endpoint: str) -> None:
    server, done = FakeServer(), []
    async with httpx.AsyncClient(transport=server, base_url="http://h/v1") as http:
        trials, duration_s = await run_round(http, load(endpoint=endpoint), lambda: done.append(1))
    assert len(trials) == len(done) == 12
    assert server.most_running == 3
    assert [trial.error for trial in trials if trial.error] == ["429: full"] * 4
    for trial in trials:
        if trial.error is None:
            assert trial.first_s is not None
            assert 0 <= trial.start_s <= trial.first_s <= trial.end_s <= duration_s
            assert (trial.prompt_tokens, trial.output_tokens, len(trial.chunk_s)) == (5, 2, 2)
    assert server.bodies[0]["max_tokens"] == 2
    assert server.bodies[0]["ignore_eos"] is True


async def test_a_server_that_cuts_its_stream_or_is_gone() -> None:
    async def cut(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text='data: {"choices": [], "usage": null}\n\ndata: [DONE]\n\n')

    async def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    for handler, word in ((cut, "without any text"), (gone, "refused")):
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://h/v1") as http:
            trials, _ = await run_round(http, load(num_requests=1), lambda: None)
        assert trials[0].error is not None
        assert word in trials[0].error
