"""What `priority` and `timeout_s` do to a request that waits: on the mock engine, one sequence at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from headrace.testing.echo_app import echo_app

LONG = {"prompt": "x", "max_tokens": 80}  # 0.4 s, in which the others come


async def start_long(http: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    """A request that has the one place."""
    task = asyncio.create_task(http.post("/v1/completions", json=LONG))
    for _ in range(1000):
        if (await http.get("/v1/load")).json()["running"]:
            return task
        await asyncio.sleep(0.005)
    raise AssertionError("it never started")


async def test_priority_decides_who_runs_next() -> None:
    order = []
    async with echo_app(max_num_seqs=1, step_delay_s=0.005) as http:

        async def ask(name: str, priority: int | None) -> None:
            body = {"prompt": "x", "max_tokens": 2, "priority": priority}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200
            order.append(name)

        first = await start_long(http)
        await asyncio.gather(*(ask(*who) for who in (("low", 3), ("normal", None), ("urgent", -3))))
        await first
    assert order == ["urgent", "normal", "low"]


async def test_timeout_s_holds_in_the_queue_too() -> None:
    async with echo_app(max_num_seqs=1, step_delay_s=0.005) as http:
        long = await start_long(http)
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "timeout_s": 0.05}
        for stream in (False, True):
            late = await http.post("/v1/completions", json={**body, "stream": stream})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (await long).json()["usage"]["completion_tokens"] == 80
