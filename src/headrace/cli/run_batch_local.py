"""Where the requests of `headrace run-batch` go without `--url`: to the server's own application, in this process.

It is what `headrace serve` runs, called without a socket; only keys, traces and their options are left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx

from headrace.client.inproc import InprocClient
from headrace.config.launch import Launch
from headrace.config.options import ObservabilityConfig, ServeConfig
from headrace.engine.core import EngineCore
from headrace.engine.process import build_core
from headrace.processing.tokenizer import Tokenizer, load_tokenizer
from headrace.server.app import create_app


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
