"""The front end under load, on the mock engine: readers that stall, and what thousands of requests leave behind."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

from headrace.testing.channel import Rig, open_rig
from headrace.testing.front_end import make_front_end

Send = Callable[[Any], Awaitable[None]]


@asynccontextmanager
async def front_end() -> AsyncIterator[tuple[Rig, FastAPI]]:
    async with open_rig("zmq") as rig:
        made = make_front_end(client=rig.client)  # type: ignore[arg-type]  # a real one
        try:
            yield rig, made.app
        finally:
            await made.close()


async def post(app: FastAPI, send: Send, leaves: asyncio.Event, **fields: object) -> None:
    """One request over bare ASGI; its client is gone once `leaves` is set."""
    content: bytes | None = json.dumps(fields).encode()

    async def receive() -> dict[str, Any]:
        nonlocal content
        if content is not None:
            body, content = content, None
            return {"type": "http.request", "body": body}
        await leaves.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)


async def test_a_reader_that_stalls_gets_the_rest_in_one_piece() -> None:
    """Deltas merge while the socket takes nothing, so that memory holds tokens and no frames."""
    async with front_end() as (rig, app):
        taken, may_take = [], asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            taken.append(message.get("body", b""))
            if len(taken) == 3:  # the head and two events went into the socket's buffers
                await may_take.wait()

        reading = asyncio.create_task(
            post(app, send, asyncio.Event(), prompt="abcd", max_tokens=400, stream=True, ignore_eos=True)
        )
        async with asyncio.timeout(20):
            while True:
                if rig.client.status().num_generated_tokens == 400:
                    break
                await asyncio.sleep(0.005)
            may_take.set()
            await reading
        assert len(taken) <= 5, "the head, two events, the rest, the end"
        frames = [json.loads(line[6:]) for line in b"".join(taken).split(b"\n\n") if line[:7] == b"data: {"]
        assert "".join(frame["choices"][0]["text"] for frame in frames) == "abcd" * 100


@pytest.mark.timeout(120)
async def test_two_thousand_requests_one_in_five_aborted_leave_nothing() -> None:
    """No objects, tasks, descriptors, permits or blocks; `python -m bench.frontend` has the memory of 20,000."""
    async with front_end() as (rig, app):
        free_blocks = rig.core.stats().num_free_blocks

        async def one(number: int) -> None:
            leaves = asyncio.Event()
            num_sent = 0

            async def send(message: dict[str, Any]) -> None:
                nonlocal num_sent
                num_sent += 1
                if num_sent == 3 and not number % 5:
                    leaves.set()

            is_left = not number % 5
            if number % 10 == 5:
                leaves.set()  # before anything has come
            await post(app, send, leaves, prompt="left", max_tokens=2000 if is_left else 2, stream=is_left)

        async def counts(first: int, last: int) -> tuple[int, int, int]:
            """What there is after requests of these numbers."""
            for start in range(first, last, 50):
                await asyncio.gather(*map(one, range(start, start + 50)))
            async with asyncio.timeout(20):
                while True:
                    if rig.core.stats().num_free_blocks == free_blocks and not rig.client.status().num_running:
                        break
                    await asyncio.sleep(0.005)
            assert (rig.client.admission.num_choices, rig.client.admission.num_tokens) == (0, 0)
            gc.collect()
            return len(gc.get_objects()), len(asyncio.all_tasks()), psutil.Process().num_fds()

        objects, *others = await counts(0, 500)
        more_objects, *more_others = await counts(500, 2000)
        assert more_others == others
        assert more_objects - objects < 300, "a fifth of an object a request"
