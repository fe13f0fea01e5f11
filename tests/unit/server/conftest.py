"""Fixtures of the HTTP layer's tests; the fakes are in `headrace.testing.front_end`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from headrace.client.inproc import InprocClient
from headrace.config.options import CacheConfig, SchedulerConfig, ServeConfig
from headrace.engine.core import EngineCore
from headrace.processing.tokenizer import Tokenizer
from headrace.server.app import create_app
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.echo import EchoExecutor
from headrace.testing.front_end import FrontEnd, http_client, make_front_end


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., FrontEnd]]:
    """`make_front_end`, with everything closed at the end."""
    opened: list[FrontEnd] = []

    def make(**options: Any) -> FrontEnd:
        opened.append(make_front_end(**options))
        return opened[-1]

    yield make
    for front_end in opened:
        await front_end.close()


@pytest.fixture
def front_end(make: Callable[..., FrontEnd]) -> FrontEnd:
    return make()


@pytest.fixture
def without_template() -> Tokenizer:
    """A base model's tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """The whole application on the mock engine, which has nothing left to do at the end."""
    config = ServeConfig()

    def core() -> EngineCore:
        executor = EchoExecutor(vocab_size=260, max_model_len=512, check_plans=True)
        return EngineCore(executor, CacheConfig(num_kv_blocks=256), SchedulerConfig(max_num_seqs=16))

    client = InprocClient(core, config.admission)
    await client.wait_ready(30)
    app = create_app(client, byte_tokenizer(), config, served_names=("echo",))
    async with http_client(app, timeout=30) as http:
        yield http
    status = client.status()
    assert (status.num_running, status.num_waiting, status.num_queued_tokens) == (0, 0, 0)
    app.state.context.inputs.close()
    await client.close()
