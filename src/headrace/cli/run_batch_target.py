"""Where the requests of `headrace run-batch` go: the server's application in this process, or a server at `--url`.

In this process it is the very application that `headrace serve` runs, called without a socket; only keys and traces
are left out. Both are an HTTP client, and the caller cannot tell one from the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

from headrace.cli.sources import api_base, raise_status
from headrace.client.inproc import InprocClient
from headrace.config.launch import Launch
from headrace.config.options import ObservabilityConfig, ServeConfig
from headrace.engine.core import EngineCore
from headrace.engine.process import build_core
from headrace.errors import StartupError
from headrace.processing.tokenizer import Tokenizer, load_tokenizer
from headrace.server.app import create_app

CONNECT_TIMEOUT_S: Final = 10.0


@asynccontextmanager
async def local_target(config: ServeConfig, model_path: Path | None) -> AsyncIterator[httpx.AsyncClient]:
    """Loads the model; without a path, the mock engine. Raises StartupError."""
    server = dataclasses.replace(config.server, api_key=(), admin_key=())
    config = dataclasses.replace(config, server=server, observability=ObservabilityConfig())
    path = None if model_path is None else str(model_path)
    launch = Launch(config=config, model_path=path, runtime_dir="", endpoint="")
    tokenizer = await asyncio.to_thread(_load_tokenizer, config, model_path)
    with ExitStack() as executors:

        def create_core() -> EngineCore:
            executor, core = build_core(launch)
            executors.callback(executor.close)
            return core

        client = InprocClient(create_core, config.admission, config.engine.control, model_path)
        try:
            app = create_app(client, tokenizer, config, served_names=launch.served_names)
            async with app.router.lifespan_context(app):
                await client.wait_ready()
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
                    yield http
        finally:
            await client.close()


def _load_tokenizer(config: ServeConfig, model_path: Path | None) -> Tokenizer:
    model = config.engine.model
    if model_path is None:
        from headrace.testing.bytes import byte_tokenizer  # only the mock engine needs it

        return byte_tokenizer()
    return load_tokenizer(model_path, model.tokenizer, model.chat_template)


@asynccontextmanager
async def server_target(url: str, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """A server that speaks OpenAI's API. Raises StartupError when none is there."""
    base = api_base(url).removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, limits=limits) as http:
        try:
            response = await http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StartupError(f"cannot reach {base}: {error}") from error
        raise_status(response)
        yield http
