"""A request that has ended is gone: nothing of it waits for the garbage collector, which would stop the event loop for
as long as it takes to free many requests at once (30 ms, with long prompts among them)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from headrace.server.middleware import past_middleware
from headrace.testing.echo_app import echo_application
from headrace.testing.garbage import TRIES, collecting

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REQUESTS: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True}),
    "completions stream": ("/v1/completions", {"prompt": "a", "n": 2, "stream": True, "stop": ["b"]}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "stream": True}),
    "responses": ("/v1/responses", {"input": "hello", "store": False}),
    "responses stream": ("/v1/responses", {"input": "hello", "store": False, "stream": True}),
    "messages": ("/v1/messages", CHAT),
    "messages stream": ("/v1/messages", CHAT | {"stream": True}),
    "generate": ("/generate", {"text": "hello"}),
    "generate stream": ("/generate", {"text": "hello", "stream": True}),
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}),
    "tokenize": ("/tokenize", {"prompt": "a"}),
    "count_tokens": ("/v1/messages/count_tokens", CHAT),
    "an unknown field's value": ("/v1/chat/completions", CHAT | {"temperature": "hot"}),
    "too many tokens": ("/v1/completions", {"prompt": "a" * 600}),
    "no JSON": ("/v1/completions", "{"),
    "no such route": ("/v1/nothing", {}),
    "out of time": ("/v1/chat/completions", CHAT | {"timeout_s": 1e-6}),
    "out of time, streamed": ("/v1/chat/completions", CHAT | {"timeout_s": 1e-6, "stream": True}),
    "control": ("/v1/control/reset_prefix_cache", {}),
}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server with the whole application, in this process, as a front end runs it."""
    async with echo_application() as app:
        server = uvicorn.Server(uvicorn.Config(past_middleware(app), port=0, log_config=None, access_log=False))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for that
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await serving


async def ask(port: int, path: str, body: Any, *, leaves: bool = False) -> bytes:
    """The reply, by a client that is made of very little."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    reply = await (reader.read(20) if leaves else reader.read())
    writer.close()
    return reply


@pytest.mark.parametrize("name", [*REQUESTS, "a client that leaves"])
async def test_nothing_of_a_request_waits_for_the_collector(port: int, name: str) -> None:
    path, body = REQUESTS.get(name, ("/v1/completions", {"prompt": "a", "max_tokens": 400, "stream": True}))
    leaves = name not in REQUESTS

    async def ask_twice() -> bytes:
        for _ in range(2):
            reply = await ask(port, path, body, leaves=leaves)
        await asyncio.sleep(0.05)  # what ends behind the reply
        return reply

    status = int((await ask_twice()).split()[1])
    assert status in (200, 400, 404, 408, 504), status
    for _ in range(TRIES):
        with collecting() as found:
            await ask_twice()
        if not found:
            break
    assert not found, sorted(set(found))
