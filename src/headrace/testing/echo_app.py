"""The whole application on the mock engine, called in process: nothing but the model is imitated.

Tests of the request surface share it. At its end it asserts that the engine has nothing left to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from headrace.client.inproc import InprocClient
from headrace.config.options import CacheConfig, SchedulerConfig, ServeConfig
from headrace.engine.core import EngineCore
from headrace.server.app import create_app
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.echo import EchoExecutor
from headrace.testing.front_end import http_client

MAX_MODEL_LEN = 512
_IDLE_S = 5.0


@asynccontextmanager
async def echo_app(
    config: ServeConfig | None = None, *, max_num_seqs: int = 16, **executor: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application; it belongs to the running loop. `executor`: as `EchoExecutor` takes it."""
    making = echo_application(config, max_num_seqs=max_num_seqs, **executor)
    async with making as app, http_client(app, timeout=30) as http:
        yield http


@asynccontextmanager
async def echo_application(
    config: ServeConfig | None = None, *, max_num_seqs: int = 16, **executor: Any
) -> AsyncIterator[FastAPI]:
    """The application itself, for whoever serves it in another way."""
    config = config or ServeConfig()

    def core() -> EngineCore:
        mock = EchoExecutor(vocab_size=260, max_model_len=MAX_MODEL_LEN, check_plans=True, **executor)
        return EngineCore(mock, CacheConfig(num_kv_blocks=256), SchedulerConfig(max_num_seqs=max_num_seqs))

    client = InprocClient(core, config.admission)
    await client.wait_ready(30)
    app = create_app(client, byte_tokenizer(), config, served_names=("echo",), set_log_level=lambda _: None)
    yield app
    await _idle(client)
    app.state.context.inputs.close()
    await client.close()


async def _idle(client: InprocClient) -> None:
    """Nothing may be left behind; the engine says so a turn of its loop after its last answer."""
    until = time.monotonic() + _IDLE_S
    while True:
        status = client.status()
        left = status.num_running, status.num_waiting, status.num_queued_tokens
        if not any(left):
            return
        assert time.monotonic() < until, left
        await asyncio.sleep(0.002)
