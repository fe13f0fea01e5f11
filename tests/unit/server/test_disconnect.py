"""A client that goes away: in a stream, before a plain reply, in the queue, while its prompt is tokenised."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.client.base import Delta
from headrace.processing.tokenizer import Tokenizer
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.front_end import FakeClient, FrontEnd, says
from headrace.transport.messages import Submit

Make = Callable[..., FrontEnd]


class Caller:
    """One request, spoken in ASGI, whose client can leave at any moment."""

    def __init__(self, front_end: FrontEnd, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.sent: list[dict[str, Any]] = []
        self.progress = asyncio.Event()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [],
                 "query_string": b"", "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http",
                 "root_path": "", "server": ("127.0.0.1", 80)}  # fmt: skip
        self.task = asyncio.create_task(front_end.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.progress.set()

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, 5)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


@pytest.fixture
def held() -> FakeClient:
    """A client whose engine says nothing until the gate opens."""
    client = FakeClient(script=says("Hello"))
    client.gate.clear()
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_leaving_the_queue(make: Make, held: FakeClient, stream: bool, path: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream, "n": 4}
    caller = Caller(make(client=held), body, path)
    await asyncio.wait_for(held.submitted.wait(), 5)
    assert held.streams[0].closed is None
    await caller.leave()
    assert held.streams[0].closed == "disconnect"
    assert caller.status in (None, 499)


async def test_leaving_in_the_middle_of_a_stream(make: Make) -> None:
    client = FakeClient()

    def script(submit: Submit) -> Iterable[list[Delta]]:
        for number, step in enumerate(says("abcdef")(submit)):
            yield step
            if number == 2:
                client.gate.clear()

    client.script = script
    front_end = make(client=client)
    caller = Caller(front_end, {"prompt": "x", "stream": True, "n": 2})
    await asyncio.wait_for(caller.progress.wait(), 5)
    await caller.leave()
    assert client.streams[0].closed == "disconnect"
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in caller.sent)
    metrics = front_end.app.state.context.metrics.render().decode()
    assert 'aborts_total{model_name="fake",reason="disconnect"} 2.0' in metrics
    assert 'request_success_total{finished_reason="abort",model_name="fake"} 2.0' in metrics


async def test_a_reader_that_stalls_and_leaves_frees_its_request(make: Make) -> None:
    """`send` blocks when the socket is full; a disconnect must end it all the same."""
    client = FakeClient(script=says("abc"))

    class Stalled(Caller):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    caller = Stalled(make(client=client), {"prompt": "x", "stream": True})
    await asyncio.wait_for(caller.progress.wait(), 5)
    await caller.leave()
    assert client.streams[0].closed == "disconnect"


async def test_leaving_while_the_prompt_is_tokenised_submits_nothing(make: Make) -> None:
    entered, gate = threading.Event(), threading.Event()

    class Slow(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            entered.set()
            gate.wait(10)
            return super().encode(text, add_special_tokens=add_special_tokens)

    slow = byte_tokenizer()
    slow.__class__ = Slow
    front_end = make(tokenizer=slow)
    caller = Caller(front_end, {"prompt": "x" * 4_000})
    assert await asyncio.to_thread(entered.wait, 10)
    await caller.leave()
    gate.set()
    assert not front_end.client.streams


async def test_an_answered_request_is_not_aborted(make: Make) -> None:
    client = FakeClient()
    front_end = make(client=client)
    caller = Caller(front_end, {"prompt": "x", "stream": True})
    await asyncio.wait_for(caller.task, 5)
    assert caller.status == 200
    metrics = front_end.app.state.context.metrics.render().decode()
    assert 'headrace:aborts_total{model_name="fake",reason="disconnect"} 0.0' in metrics
    assert 'request_success_total{finished_reason="stop",model_name="fake"} 1.0' in metrics


async def test_cancelling_the_handler_ends_the_request(make: Make, held: FakeClient) -> None:
    caller = Caller(make(client=held), {"prompt": "x"})
    await asyncio.wait_for(held.submitted.wait(), 5)
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.task
    assert held.streams[0].closed is not None


async def test_no_task_is_left_behind(make: Make, held: FakeClient) -> None:
    front_end = make(client=held)
    before = len(asyncio.all_tasks())
    for stream in (False, True) * 10:
        held.submitted.clear()
        caller = Caller(front_end, {"prompt": "x", "stream": stream})
        await asyncio.wait_for(held.submitted.wait(), 5)
        await caller.leave()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before
    assert all(stream.closed == "disconnect" for stream in held.streams)
