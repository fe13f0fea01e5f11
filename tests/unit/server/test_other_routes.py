"""Models, tokenize, probes, numbers, aborts, OpenAPI."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.client.base import Delta, EngineStatus, RankStatus
from headrace.client.status import lifecycle_reasons
from headrace.errors import DeadlineExceeded, QueueFull
from headrace.server.routes.health import PROBE_TIMEOUT_S
from headrace.testing.front_end import FakeClient, FrontEnd
from headrace.transport.messages import Lifecycle, Submit
from headrace.types import FinishReason

Make = Callable[..., FrontEnd]


async def test_models(front_end: FrontEnd) -> None:
    body = (await front_end.http.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["fake", "alias"]
    assert (await front_end.http.get("/v1/models/alias")).json() == body["data"][1]
    assert body["data"][0]["max_model_len"] == 256


async def test_tokenize_and_detokenize(front_end: FrontEnd) -> None:
    body = (await front_end.post("/tokenize", {"prompt": "h\u00e9", "return_token_strs": True})).json()
    assert body["tokens"] == list("h\u00e9".encode())
    assert (body["count"], body["max_model_len"]) == (3, 256)
    assert len(body["token_strs"]) == 3
    assert (await front_end.post("/detokenize", {"tokens": body["tokens"]})).json() == {"prompt": "h\u00e9"}
    messages = [{"role": "user", "content": "Hi"}]
    tokens = (await front_end.post("/tokenize", {"messages": messages})).json()["tokens"]
    await front_end.chat()
    assert tuple(tokens) == front_end.submit.prompts[0]
    text = (await front_end.post("/detokenize", {"tokens": tokens})).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_tokenize_refusals(front_end: FrontEnd, path: str, body: Any, param: str) -> None:
    response = await front_end.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


READY = ("/readyz", "/health", "/ping", "/health_generate")
RANKS = tuple(RankStatus(rank, 40 + rank, 60.0 if rank == 2 else 0.25, 9) for rank in range(4))


async def test_ready(front_end: FrontEnd) -> None:
    for path in READY:
        response = await front_end.http.get(path)
        assert response.status_code == 200
        assert response.json()["reasons"] == []
    assert (await front_end.http.post("/ping")).status_code == 200


@pytest.mark.parametrize(
    ("status", "reasons"),
    [
        (EngineStatus(is_ready=False, reasons=("starting",)), ["starting"]),
        (EngineStatus(is_ready=False, reasons=("engine_dead",)), ["engine_dead"]),
        (EngineStatus(is_ready=True, heartbeat_age_s=60.0), ["engine_stalled"]),
        (EngineStatus(is_ready=False), ["not_ready"]),
        (EngineStatus(is_ready=True, ranks=RANKS), ["rank_2_stalled"]),
    ],
)
async def test_not_ready_says_why(make: Make, status: EngineStatus, reasons: list[str]) -> None:
    front_end = make(client=FakeClient(engine_status=status))
    for path in READY:
        response = await front_end.http.get(path)
        assert response.status_code == 503
        body = response.json()
        assert (body["status"], body["reasons"], body["error"]["code"]) == ("not_ready", reasons, reasons[0])
        if path != "/health_generate":
            assert (await front_end.http.head(path)).status_code == 503
    assert (await front_end.http.get("/livez")).status_code == 200
    assert (await front_end.http.head("/livez")).status_code == 200
    assert not front_end.client.streams


async def test_several_ranks_are_listed(make: Make) -> None:
    front_end = make(client=FakeClient(engine_status=EngineStatus(is_ready=True, ranks=RANKS[:2])))
    response = await front_end.http.get("/readyz")
    assert (response.status_code, response.json()) == (
        200,
        {
            "status": "ready",
            "reasons": [],
            "ranks": [{"rank": rank, "pid": 40 + rank, "heartbeat_age_s": 0.25, "num_steps": 9} for rank in (0, 1)],
        },
    )
    stalled = make(client=FakeClient(engine_status=EngineStatus(is_ready=True, ranks=RANKS)))
    assert [rank["rank"] for rank in (await stalled.http.get("/readyz")).json()["ranks"]] == [0, 1, 2, 3]


async def test_draining_is_not_ready(front_end: FrontEnd) -> None:
    front_end.lifecycle.drain()
    response = await front_end.http.get("/readyz")
    assert (response.status_code, response.json()["reasons"]) == (503, ["draining"])


async def test_health_generate_sends_one_token_through_the_queue(front_end: FrontEnd) -> None:
    await front_end.http.get("/health_generate")
    submit = front_end.submit
    assert (submit.params.max_tokens, submit.timeout_s) == (1, PROBE_TIMEOUT_S)
    assert PROBE_TIMEOUT_S < 5
    assert submit.priority < -(2**31) + 1


@pytest.mark.parametrize("state", ["asleep", "updating", "poisoned"])
async def test_probes_without_weights_say_so_at_once(make: Make, state: str) -> None:
    """A monitor that gives up after 5 s gets a reason, and no request waits for a trainer."""
    reasons = lifecycle_reasons(Lifecycle(state=state))
    front_end = make(client=FakeClient(engine_status=EngineStatus(is_ready=False, reasons=reasons)))
    response = await front_end.http.get("/health_generate")
    assert (response.status_code, response.json()["reasons"]) == (503, list(reasons))
    assert not front_end.client.streams


async def test_health_generate_tells_what_the_engine_says(make: Make) -> None:
    def late(submit: Submit) -> Iterable[list[Delta]]:
        yield [Delta(0, finish_reason=FinishReason.ABORT, error=DeadlineExceeded("4.5 s are over").info())]

    assert (await make(client=FakeClient(script=late)).http.get("/health_generate")).status_code == 504
    full = FakeClient(error=QueueFull("full"))
    assert (await make(client=full).http.get("/health_generate")).status_code == 429


async def test_load(make: Make) -> None:
    status = EngineStatus(
        is_ready=True, num_running=2, num_waiting=3, num_queued_tokens=40, num_free_blocks=16, num_blocks=64,
        prefix_queries=100, prefix_hits=25, step=9,
    )  # fmt: skip
    body = (await make(client=FakeClient(engine_status=status)).http.get("/v1/load")).json()
    (rank,) = body.pop("ranks")
    assert body == {
        "running": 2,
        "waiting": 3,
        "queued_tokens": 40,
        "free_blocks": 16,
        "num_blocks": 64,
        "kv_usage": 0.75,
        "prefix_hit_rate": 0.25,
    }
    assert body.items() <= rank.items()


async def test_version_and_openapi(front_end: FrontEnd) -> None:
    assert (await front_end.http.get("/version")).json()["version"]
    page = (await front_end.http.get("/docs")).text
    assert "SwaggerUIBundle({" in page
    assert page.index("SwaggerUIBundle({") < page.index("if (!window.SwaggerUIBundle) fetch("), "when that has failed"
    assert page.count("</body>") == 1
    assert "fastapi" not in page
    schema = (await front_end.http.get("/openapi.json")).json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rsplit("/", 1)[1] in schema["components"]["schemas"]
    properties = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "top_k", "max_completion_tokens", "cache_salt"} <= set(properties)

    def refs(node: Any) -> Iterable[str]:
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str):
                yield ref
            for child in node.values():
                yield from refs(child)
        elif isinstance(node, list):
            for child in node:
                yield from refs(child)

    known = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert set(refs(schema)) <= known
    described = {path for path, item in schema["paths"].items() for op in item.values() if "default" in op["responses"]}
    assert described == set(schema["paths"])


async def test_abort_by_names_and_all(front_end: FrontEnd) -> None:
    response = await front_end.post("/v1/control/abort", {"request_ids": ["cmpl-1", "x"], "request_id": "y"})
    assert response.status_code == 200
    body = response.json()
    assert body["aborted"] == 3
    assert (body["kind"], body["state"], body["error"]) == ("abort", "succeeded", None)
    assert body["result"] == [{"rank": 0, "aborted": 3}]
    assert body["started"] <= body["ended"]
    assert body["id"]
    await front_end.post("/v1/control/abort", {"all": True})
    assert front_end.client.aborts == [(None, ["cmpl-1", "x", "y"], "control"), (None, None, "control")]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"all": False},
        {"request_ids": []},
        {"all": True, "request_ids": ["x"]},
        {"request_ids": [5]},
        {"request_ids": ["x" * 200]},
        {"request_ids": ["x"] * 10_001},
        {"all": "yes"},
    ],
)
async def test_abort_never_guesses(front_end: FrontEnd, body: Any) -> None:
    assert (await front_end.post("/v1/control/abort", body)).status_code == 400
    assert not front_end.client.aborts


async def test_lag_is_observed_while_the_application_runs(front_end: FrontEnd) -> None:
    async with front_end.app.router.lifespan_context(front_end.app):
        await asyncio.sleep(0.05)
        gc.collect()
        await asyncio.sleep(0.1)
    for name in ("event_loop_lag_seconds", "gc_pause_seconds"):
        assert front_end.app.state.context.metrics.histogram(name).cumulative()[-1][1] >= 1
