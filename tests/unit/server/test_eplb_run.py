"""The leader of a rearrangement: what it asks of whom, in which order, and that any failure is told to all."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from headrace.server import eplb_run
from headrace.testing.fake_control import EXPERT_TOKENS, RUN
from headrace.testing.front_end import FrontEnd

ADDRESSES = ["a:1", "b:2"]
SUM = [[10, 2, 2, 2], [4, 4, 4, 4]]
LOGIN = {"user": "scheduler", "passwd": "s3cret"}
STATS, RECV, LOADED = "stats", "recv_expert_weight", "check_load_weight_result"
GO, ABORT = "update_weight_from_tensor", "abort"
OK = {"code": 0, "msg": "ok"}


@dataclass
class Servers:
    """Two of them; `replies[address, step]` is what one says instead, or what it does."""

    replies: dict[tuple[str, str], Any] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    num_polls: int = 2  # the second finds the weights there

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        address, body = f"{request.url.host}:{request.url.port}", json.loads(request.content)
        step = STATS if request.url.path == "/get_per_expert_tokens_stats" else body["action"]
        self.asked.append((address, step, body))
        reply = self.replies.get((address, step))
        if callable(reply):
            reply = await reply()
        if isinstance(reply, httpx.Response):
            return reply
        if reply is None and step == STATS:
            reply = {**OK, "data": EXPERT_TOKENS}
        if reply is None and step == LOADED:
            is_there = self.steps()[address, LOADED] >= self.num_polls
            reply = {**OK, "data": [int(is_there)] * 2}
        return httpx.Response(200, json=reply or OK)

    def steps(self) -> Counter[tuple[str, str]]:
        return Counter((address, step) for address, step, _ in self.asked)

    def order(self) -> list[str]:
        return list(dict.fromkeys(step for _, step, _ in self.asked))


async def lead(front_end: FrontEnd, servers: Servers, timeout_s: float = 5.0) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(servers)) as http:
        peers = eplb_run.Peers(http=http, addresses=ADDRESSES, run_id="run-1", timeout_s=timeout_s, credentials=LOGIN)
        await eplb_run.lead(front_end.app.state.context, peers)


def own(front_end: FrontEnd) -> list[dict[str, Any]]:
    """What the leader's own engine was told, besides questions."""
    return [arguments for kind, arguments in front_end.client.controlled.calls if kind == "rebalance_experts"]


async def test_the_order_of_a_run(front_end: FrontEnd) -> None:
    servers = Servers()
    await lead(front_end, servers)
    assert servers.order() == [STATS, RECV, LOADED, GO]
    assert servers.steps() == Counter({
        (address, step): 2 if step == LOADED else 1 for address in ADDRESSES for step in servers.order()
    })  # fmt: skip
    for _, step, body in servers.asked:
        assert {**body, **LOGIN, "run": "run-1"} == body
        if step == RECV:
            assert body["data"] == SUM
    assert ("experts", {"run": "run-1"}) in front_end.client.controlled.calls
    assert own(front_end) == []


async def hang() -> None:
    await asyncio.Event().wait()


async def dead() -> None:
    raise httpx.ConnectError("nobody there")


@pytest.mark.parametrize(
    ("step", "reply", "words"),
    [
        (STATS, dead, "nobody there"),
        (STATS, hang, "within 0.05 s"),
        (STATS, httpx.Response(401, json={"code": 1, "msg": "no"}), "401"),
        (STATS, httpx.Response(200, text="hello"), "did not answer"),
        (STATS, {**OK, "data": [[1]]}, "ranks"),
        (STATS, {**OK, "data": [[[-1]]]}, "ranks"),
        (STATS, {**OK, "data": [[["x"]]]}, "ranks"),
        (STATS, {**OK, "data": [[[1, 2]], [[1]]]}, "ranks"),
        (STATS, {**OK, "data": [[[1, 2, 3]]]}, "other layers"),
        (RECV, {"code": 1, "msg": "no"}, "refused"),
        (RECV, hang, "within"),
        (LOADED, {**OK, "data": [1, -1]}, "could not bring"),
        (LOADED, {**OK, "data": []}, "could not bring"),
        (LOADED, {**OK, "data": "x"}, "could not bring"),
        (LOADED, hang, "within"),
    ],
)
async def test_a_failure_ends_the_run_everywhere(
    front_end: FrontEnd, caplog: pytest.LogCaptureFixture, step: str, reply: Any, words: str
) -> None:
    servers = Servers(replies={("b:2", step): reply})
    front_end.client.controlled.replies["experts"] = {"run": {**RUN, "state": "open"}}
    async with asyncio.timeout(5):
        await lead(front_end, servers, 0.05 if reply is hang else 5.0)
    assert words in caplog.text
    assert "s3cret" not in caplog.text
    assert all(servers.steps()[address, ABORT] == 1 for address in ADDRESSES)
    assert not any(servers.steps()[address, GO] for address in ADDRESSES)
    assert own(front_end) == [{"action": "abort", "run": "run-1"}]


async def test_the_weights_take_too_long(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eplb_run, "LOAD_TIMEOUT_S", 0.05)
    servers = Servers(num_polls=10_000)
    await lead(front_end, servers)
    assert servers.order() == [STATS, RECV, LOADED, ABORT]


@pytest.mark.parametrize("last", [dead, {"code": 1, "msg": "no"}])
async def test_there_is_no_way_back_from_a_commit(
    front_end: FrontEnd, caplog: pytest.LogCaptureFixture, last: Callable[[], Any] | dict[str, Any]
) -> None:
    servers = Servers(replies={("a:1", GO): last})
    await lead(front_end, servers)
    assert servers.steps()["b:2", GO] == 1
    assert ABORT not in servers.order()
    assert "not where a:1" in caplog.text


async def test_a_leader_that_is_not_among_the_servers_frees_itself(front_end: FrontEnd) -> None:
    front_end.client.controlled.replies["experts"] = {"run": {**RUN, "state": "open"}}
    await lead(front_end, Servers())
    assert own(front_end) == [{"action": "abort", "run": "run-1"}]
