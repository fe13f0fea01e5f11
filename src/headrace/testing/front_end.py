"""A front end without an engine, for tests of the HTTP layer: a client whose outputs a test writes down, and the
application on top of it, called in process through httpx. Fakes only: what an engine would do is not imitated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from headrace.client.base import Delta, EngineStatus
from headrace.client.lifecycle import Lifecycle
from headrace.config.options import AdmissionConfig, ParsingConfig, ServeConfig, ServerConfig
from headrace.errors import RequestError
from headrace.processing.tokenizer import Tokenizer
from headrace.server.app import create_app
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.fake_control import FakeControl
from headrace.transport.messages import EngineInfo, Submit
from headrace.types import FinishReason, LogprobRows, RequestId

VOCAB_SIZE = 260
INFO = EngineInfo(
    model="fake", vocab_size=VOCAB_SIZE, max_model_len=256, max_num_seqs=8, block_size=4, num_blocks=64, backend="fake"
)
Script = Callable[[Submit], Iterable[list[Delta]]]


def rows(token_ids: Sequence[int], width: int, logprob: float = -0.5) -> LogprobRows:
    """Each token, then `width - 1` others that follow it in the vocabulary."""
    ids = (np.array(token_ids)[:, None] + np.arange(width)[None, :]) % VOCAB_SIZE
    values = np.full((len(token_ids), width), logprob, np.float32) - np.arange(width, dtype=np.float32)
    return LogprobRows.from_arrays(ids, values, np.ones(len(token_ids), np.int32))


def says(text: str, *, reason: FinishReason = FinishReason.STOP) -> Script:
    """Every choice says `text`, a byte a step, with the logprobs that were asked for; the end is a step of its own."""

    def script(submit: Submit) -> Iterable[list[Delta]]:
        params, num_choices = submit.params, len(submit.prompts) * submit.params.n
        for step, token_id in enumerate(text.encode()):
            deltas = []
            for choice in range(num_choices):
                delta = Delta(choice, [token_id])
                if params.logprobs is not None:
                    delta.logprobs = rows([token_id], params.logprobs + 1)
                if step == 0:
                    delta.num_cached_tokens, delta.queue_s, delta.prefill_s = 0, 0.1, 0.2
                    delta.weights_versions = ((0, "step-7"),)
                    prompt = submit.prompts[choice // params.n]
                    if params.prompt_logprobs is not None and len(prompt) > 1:
                        delta.prompt_logprobs = rows(prompt[1:], params.prompt_logprobs + 1)
                deltas.append(delta)
            yield deltas
        yield [Delta(choice, finish_reason=reason) for choice in range(num_choices)]

    return script


class FakeStream:
    """Plays a script; waits at the gate before each step."""

    def __init__(self, request: Submit, steps: Iterable[list[Delta]], gate: asyncio.Event) -> None:
        self.request_id = request.request_id
        self.request = request
        self.closed: str | None = None
        self.aborted: list[int] = []
        self.is_read = asyncio.Event()
        self._steps = steps
        self._gate = gate

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        self.is_read.set()
        for step in self._steps:
            await self._gate.wait()
            yield step

    def abort_choice(self, choice: int) -> None:
        self.aborted.append(choice)

    def close(self, reason: str = "disconnect") -> None:
        if self.closed is None:
            self.closed = reason


@dataclass
class FakeClient:
    info: EngineInfo = INFO
    script: Script = field(default_factory=lambda: says("Hello"))
    error: RequestError | None = None
    engine_status: EngineStatus = field(default_factory=lambda: EngineStatus(is_ready=True, num_blocks=64))
    streams: list[FakeStream] = field(default_factory=list)
    aborts: list[tuple[Any, Any, str]] = field(default_factory=list)
    trace_parents: list[str | None] = field(default_factory=list)  # of control operations
    controlled: FakeControl = field(default_factory=FakeControl)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        return self.info

    def next_request_id(self) -> RequestId:
        return RequestId(len(self.streams) + 1)

    def submit(self, request: Submit) -> FakeStream:
        if self.error is not None:
            raise self.error
        stream = FakeStream(request, self.script(request), self.gate)
        self.streams.append(stream)
        self.submitted.set()
        return stream

    async def abort(
        self,
        request_ids: Sequence[RequestId] | None = None,
        names: Sequence[str] | None = None,
        reason: str = "client",
    ) -> int:
        self.aborts.append((request_ids, names, reason))
        return 3

    async def control(self, operation: str, *, trace_parent: str | None = None, **arguments: Any) -> dict[str, Any]:
        self.trace_parents.append(trace_parent)
        if self.error is not None:
            raise self.error
        return await self.controlled(operation, arguments)

    def status(self) -> EngineStatus:
        return self.engine_status

    async def close(self) -> None:
        pass


@dataclass
class FrontEnd:
    """An application and the ways to call it."""

    app: FastAPI
    client: FakeClient
    lifecycle: Lifecycle
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "Hi", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **fields})

    async def close(self) -> None:
        self.app.state.context.inputs.close()
        await self.http.aclose()

    @property
    def submit(self) -> Submit:
        """What the engine got last."""
        return self.client.streams[-1].request


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream; checks its framing and that it ends with the one [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    assert data.pop() == "[DONE]"
    assert "[DONE]" not in data
    return [json.loads(item) for item in data]


def http_client(app: FastAPI, host: str = "127.0.0.1", **kwargs: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=(host, 5000)), base_url="http://127.0.0.1:8000", **kwargs
    )


def with_info(**fields: Any) -> FakeClient:
    """A client of an engine with another size."""
    values = {name: getattr(INFO, name) for name in INFO.__struct_fields__}
    return FakeClient(info=EngineInfo(**{**values, **fields}))


def make_front_end(
    *,
    client: FakeClient | None = None,
    host: str = "127.0.0.1",
    admission: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    parsing: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    front_end: int = 0,
    runtime_dir: Path | None = None,
) -> FrontEnd:
    """`host`: where requests seem to come from; `admission`, `server`, `parsing`: options that differ from the
    defaults; `runtime_dir`: what the front ends of one server share."""
    config = ServeConfig(
        admission=AdmissionConfig(**(admission or {})),
        server=ServerConfig(**(server or {})),
        parsing=ParsingConfig(**(parsing or {})),
    )
    client, lifecycle = client or FakeClient(), Lifecycle()
    tokenizer = tokenizer or byte_tokenizer()
    app = create_app(
        client,
        tokenizer,
        config,
        served_names=("fake", "alias"),
        lifecycle=lifecycle,
        front_end=front_end,
        runtime_dir=runtime_dir,
    )
    return FrontEnd(app, client, lifecycle, http_client(app, host))
