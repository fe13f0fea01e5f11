"""Clients that do everything at once to one server: requests, aborts, pauses, sleep, refreshes of every kind, senders
that die. For tests/e2e; it keeps what each request was told, and leaves it to the test what that must have been.

The plan of the rounds follows from the seed alone; how they meet in time does not. A label names its model and what
its commit did to KV, as in `b-17-keep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

NUM_CLIENTS = 8
CALL_S = 20.0  # the longest that any HTTP call may take
MAX_TOKENS = 400
PROMPTS = [list(text) for text in (b"water", b"the wheel turns", b"a mill by the river", b"stone " * 20)]


@dataclass
class Outcome:
    """All that a client was told of one request of one choice."""

    prompt: int
    max_tokens: int
    started_s: float
    ended_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    version: str | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0

    def take(self, frame: dict[str, Any]) -> None:
        """A frame of a stream, or a whole reply."""
        assert not self.finishes, f"something came after the end: {frame}"
        assert not self.errors, f"something came after the end: {frame}"
        if "error" in frame:
            self.errors.append(frame["error"]["code"])
            return
        (choice,) = frame["choices"]
        self.token_ids += choice["token_ids"]
        self.spans = choice.get("weight_versions", [])
        if choice["finish_reason"] is not None:
            self.finishes.append(choice["finish_reason"])
            self.version = frame["weight_version"]


@dataclass(frozen=True)
class Commit:
    """A label, and when it became current: at some time between the call and its answer."""

    epoch: int
    label: str
    called_s: float
    answered_s: float


class Chaos:
    """The clients of one server, and what they were told."""

    def __init__(self, url: str, models: dict[str, Path], seed: int) -> None:
        """`models` are folders by a letter; each has its tensors also as first.safetensors and second.safetensors."""
        self.url = url
        self.models = models
        self.plan = random.Random(seed)  # what the rounds are
        self.random = random.Random(seed + 1)  # their details, some of which depend on what has happened
        self.clients: list[httpx.AsyncClient] = []
        self.outcomes: list[Outcome] = []
        self.commits: list[Commit] = []
        self.running: dict[str, asyncio.Task[Any]] = {}  # requests by their names
        self.beside: set[asyncio.Task[Any]] = set()  # operations that rounds do not wait for
        self.heal_at: set[int] = set()
        self.round = 0
        self.number = 0
        self.counts: dict[str, int] = {}  # of operations, by their outcomes

    # ------------------------------------------------------------------------------------------------------------ calls

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            self.clients = [
                await stack.enter_async_context(httpx.AsyncClient(base_url=self.url, timeout=CALL_S))
                for _ in range(NUM_CLIENTS)
            ]
            yield

    @property
    def client(self) -> httpx.AsyncClient:
        self.number += 1
        return self.clients[self.number % NUM_CLIENTS]

    async def post(self, kind: str, **body: Any) -> httpx.Response:
        async with asyncio.timeout(CALL_S):
            reply = await self.client.post(f"/v1/control/{kind}", **({"json": body} if "content" not in body else body))
        assert reply.status_code in (200, 202, 404, 409, 504), f"{kind} {body.keys()}: {reply.text}"
        kind = kind.rpartition("/")[2]
        name = kind if reply.status_code < 300 else f"{kind}: {reply.json()['error']['code']}"
        self.counts[name] = self.counts.get(name, 0) + 1
        return reply

    async def status(self) -> dict[str, Any]:
        async with asyncio.timeout(CALL_S):
            reply = await self.client.get("/v1/control/status")
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    async def insist(self, kind: str, **body: Any) -> None:
        """Until no other operation is in the way."""
        async with asyncio.timeout(CALL_S):
            while (reply := await self.post(kind, **body)).status_code == 409:
                assert reply.json()["error"]["code"] == "operation_running", reply.text
                await asyncio.sleep(0.01)
        assert reply.status_code == 200, reply.text

    # --------------------------------------------------------------------------------------------------------- requests

    def submit(self, *, is_patient: bool = False) -> None:
        """A request that goes on beside the next rounds. A patient client has no deadline, and does not leave."""
        self.number += 1
        name = f"chaos-{self.number}"
        outcome = Outcome(
            self.random.randrange(len(PROMPTS)), self.random.choice([1, 40, 200, MAX_TOKENS]), time.monotonic()
        )
        body = {
            "prompt": PROMPTS[outcome.prompt],
            "max_tokens": outcome.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "request_id": name,
            "stream": self.random.random() < 0.5,
            "timeout_s": None if is_patient else self.random.choice([None, None, None, 0.03, 0.3]),
        }
        leaves = not is_patient and self.random.random() < 0.1
        self.running[name] = asyncio.create_task(self._request(body, outcome, leaves=leaves))

    async def _request(self, body: dict[str, Any], outcome: Outcome, *, leaves: bool) -> None:
        async with (
            asyncio.timeout(CALL_S),
            self.client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            if reply.headers["content-type"].startswith("text/event-stream"):
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        outcome.num_done += 1
                    elif line:
                        outcome.take(json.loads(line.removeprefix("data: ")))
                    if leaves and outcome.token_ids:
                        return  # and nobody is told how it ended
                assert outcome.num_done == 1
            else:
                outcome.take(json.loads(await reply.aread()))
        outcome.ended_s = time.monotonic()
        self.outcomes.append(outcome)

    async def request(self) -> None:
        self.submit()
        await asyncio.sleep(0)

    async def abort(self) -> None:
        if self.running and self.random.random() < 0.7:
            await self.post("abort", request_ids=[self.random.choice(list(self.running))])
        else:
            await self.post("abort", all=True)

    # ------------------------------------------------------------------------------------------------------- operations

    async def pause(self) -> None:
        mode = self.random.choice(["abort", "wait", "keep", "keep"])
        call = self.post("pause", mode=mode, timeout_s=3.0, clear_cache=self.random.random() < 0.2)
        self._soon(5)
        if mode == "wait":
            self._beside(call)
        else:
            await call

    async def sleep(self) -> None:
        tags = self.random.choice([["weights"], ["kv_cache"], ["weights", "kv_cache"]])
        self._soon(4)
        await self.post("sleep", tags=tags, mode=self.random.choice(["abort", "keep"]))

    async def refresh(self) -> None:
        """From a folder, or with the tensors as the body."""
        model, label, options = self._new_version()
        staged = self.random.choice(["always", "never"])
        if self.random.random() < 0.7:
            body: dict[str, Any] = {"source": {"kind": "path", "path": str(self.models[model])}, "staged": staged}
            call = self.commit("refresh_weights", label, **body, **options)
        else:
            data = (self.models[model] / "model.safetensors").read_bytes()
            call = self.commit("refresh_weights", label, **_sent(data, {"version": label, "staged": staged, **options}))
        if options["mode"] == "wait":
            self._beside(call)
        else:
            await call

    async def refresh_in_parts(self) -> None:
        model, label, options = self._new_version()
        began = await self.post("begin_refresh", staged=self.random.choice(["always", "never"]), mode="keep")
        if began.status_code != 200:
            return
        for part in ("first", "second"):
            await self.post("apply_refresh", **_sent((self.models[model] / f"{part}.safetensors").read_bytes(), {}))
            self.submit()
        await self.commit("commit_refresh", label, **{**options, "mode": "keep"})

    async def die(self) -> None:
        """A sender that is killed in the middle of a body: its refresh ends in silence."""
        began = await self.post("begin_refresh", staged=self.random.choice(["always", "never"]), mode="keep")
        if began.status_code != 200:
            return
        await self.post("apply_refresh", **_sent((self.models["b"] / "first.safetensors").read_bytes(), {}))
        address = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = "POST /v1/control/apply_refresh HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-safetensors\r\n"
        writer.write(head.encode() + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000)
        await writer.drain()
        writer.transport.abort()
        self._soon(2)

    async def cancel(self) -> None:
        """A wait for requests that is called off, if it has not ended by then."""
        reply = await self.post("pause", mode="wait", wait=False)
        if reply.status_code == 202:
            operation = (await self.post(f"operations/{reply.json()['id']}/cancel")).json()
            assert operation["state"] in ("cancelled", "succeeded", "failed"), operation
        self._soon(1)

    async def commit(self, kind: str, label: str, **body: Any) -> None:
        called_s = time.monotonic()
        reply = await self.post(kind, **(body if "content" in body else {"version": label, **body}))
        if reply.status_code == 200:
            (result,) = reply.json()["result"]
            assert result["version"] == label
            self.commits.append(Commit(result["epoch"], label, called_s, time.monotonic()))

    async def heal(self) -> None:
        """Whatever has become of the engine, it serves afterwards."""
        await self.insist("wake")
        async with asyncio.timeout(CALL_S):
            while True:
                status = await self.status()
                if status["refresh"] is None and status["operation"] is None:
                    break
                await asyncio.sleep(0.02)  # a dead sender: its refresh ends by itself
        if status["state"] == "poisoned":
            model, label, _ = self._new_version()
            await self.commit("refresh_weights", label, source={"kind": "path", "path": str(self.models[model])})
        await self.insist("resume")

    def _new_version(self) -> tuple[str, str, dict[str, Any]]:
        model, kv = self.random.choice(list(self.models)), self.random.choice(["keep", "recompute"])
        self.number += 1
        options = {"kv": kv, "mode": self.random.choice(["keep", "keep", "abort", "wait"])}
        return model, f"{model}-{self.number}-{kv}", options

    def _soon(self, most: int) -> None:
        self.heal_at.add(self.round + self.random.randint(1, most))

    def _beside(self, call: Coroutine[Any, Any, Any]) -> None:
        self.beside.add(asyncio.create_task(call))

    # ----------------------------------------------------------------------------------------------------------- rounds

    async def run_rounds(self, rounds: range) -> None:
        actions: dict[Callable[[], Awaitable[None]], int] = {
            self.request: 52, self.abort: 6, self.pause: 7, self.refresh: 14, self.refresh_in_parts: 4,
            self.die: 3, self.sleep: 5, self.cancel: 4,
        }  # fmt: skip
        for self.round in rounds:
            if self.round in self.heal_at:
                await self.heal()
            (action,) = self.plan.choices(list(actions), list(actions.values()))
            await action()
            await self.collect(is_done=True)

    async def collect(self, *, is_done: bool = False) -> None:
        """Takes what tasks have to say: all that have ended, or all that there are."""
        tasks = {*self.running.values(), *self.beside}
        tasks = {task for task in tasks if task.done()} if is_done else tasks
        for task in tasks:
            await task
        self.beside -= tasks
        self.running = {name: task for name, task in self.running.items() if task not in tasks}

    async def quiesce(self) -> None:
        """Every request and every operation has ended, and the server is ready."""
        await self.heal()
        await self.collect()
        await self.heal()
        status = await self.status()
        assert (status["num_running"], status["num_waiting"]) == (0, 0)
        for client in self.clients:
            assert (await client.get("/readyz")).status_code == 200


def _sent(data: bytes, query: dict[str, Any]) -> dict[str, Any]:
    return {"content": data, "params": query, "headers": {"content-type": "application/x-safetensors"}}
