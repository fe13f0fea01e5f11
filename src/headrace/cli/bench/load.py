"""The load of `bench serve`: prompts of random words, sent at a fixed concurrency or at Poisson arrivals.

Speaks plain OpenAI API over httpx, so that any server can be measured by the same means; `stats.py` judges.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.cli.bench.stats import Trial
from headrace.cli.sse import data_of

# Common words, each one token in the usual vocabularies when a space precedes it.
_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information
"""
WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send."""

    model: str
    endpoint: str  # completions or chat
    num_requests: int
    concurrency: int | None
    request_rate: float | None  # per second
    input_tokens: int
    output_tokens: int
    ignore_eos: bool
    seed: int


def prompts_of(load: Load) -> list[str]:
    """As many prompts as requests; a function of the seed. All differ from the first word on, so no cache helps."""
    generator = random.Random(f"prompts {load.seed}")  # text, since numbers n and -n seed alike
    return [" ".join(generator.choices(WORDS, k=max(1, load.input_tokens))) for _ in range(load.num_requests)]


def arrivals_of(load: Load) -> list[float]:
    """Seconds after the beginning at which requests are sent: all at once, or a Poisson process."""
    if load.request_rate is None:
        return [0.0] * load.num_requests
    generator = random.Random(f"arrivals {load.seed}")
    gaps = (generator.expovariate(load.request_rate) for _ in range(load.num_requests - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


async def run_round(http: httpx.AsyncClient, load: Load, on_done: Callable[[], None]) -> tuple[list[Trial], float]:
    """Sends everything once; returns a trial per request, and the seconds that it took."""
    begin = time.perf_counter()
    slots = asyncio.Semaphore(load.concurrency or load.num_requests)

    async def one(prompt: str, arrival_s: float) -> Trial:
        await asyncio.sleep(max(0.0, arrival_s - (time.perf_counter() - begin)))
        async with slots:
            trial = await _send(http, load, prompt, begin)
        on_done()
        return trial

    pairs = zip(prompts_of(load), arrivals_of(load), strict=True)
    trials = await asyncio.gather(*(one(prompt, arrival) for prompt, arrival in pairs))
    return trials, time.perf_counter() - begin


def body_of(load: Load, prompt: str) -> tuple[str, dict[str, Any]]:
    """The route and the JSON of one request."""
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.endpoint == "chat":
        return "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
    return "/completions", {**body, "prompt": prompt}


async def _send(http: httpx.AsyncClient, load: Load, prompt: str, begin: float) -> Trial:
    path, body = body_of(load, prompt)
    trial = Trial(start_s=time.perf_counter() - begin)
    try:
        async with http.stream("POST", path, json=body) as response:
            if not response.is_success:
                text = (await response.aread()).decode("utf-8", "replace")
                trial.error = f"{response.status_code}: {_message(text)}"
            else:
                await _read(response.aiter_lines(), trial, begin)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        trial.error = f"{type(error).__name__}: {error}"
    trial.end_s = time.perf_counter() - begin
    if trial.error is None and trial.first_s is None:
        trial.error = "the stream ended without any text"
    return trial


async def _read(lines: AsyncIterator[str], trial: Trial, begin: float) -> None:
    has_usage = False
    async for line in lines:
        data = data_of(line)
        if data is None:
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            trial.error = f"in the stream: {chunk['error'].get('message', chunk['error'])}"
            return
        if any(_text(choice) for choice in chunk.get("choices", ())):
            now = time.perf_counter() - begin
            trial.first_s = now if trial.first_s is None else trial.first_s
            trial.chunk_s.append(now)
        if usage := chunk.get("usage"):
            has_usage = True
            trial.prompt_tokens, trial.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not has_usage:
        trial.output_tokens = len(trial.chunk_s)  # a server without usage: one token a chunk is the best guess


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or ""


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]
