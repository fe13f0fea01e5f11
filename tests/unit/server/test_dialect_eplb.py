"""FastDeploy's routes of expert balancing: who may call, what each body becomes, each refusal; SGLang's recorder."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headrace.config.options import EplbConfig, ParallelConfig, ServeConfig
from headrace.errors import ConfigError, Conflict
from headrace.server import eplb_run
from headrace.server.app import create_app
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.fake_control import EXPERT_TOKENS, EXPERTS, RUN
from headrace.testing.front_end import FakeClient, FrontEnd

Make = Callable[..., FrontEnd]
START, STATS, CHECK = "/rearrange_experts", "/get_per_expert_tokens_stats", "/check_redundant"
RECV, GO = {"action": "recv_expert_weight"}, {"action": "update_weight_from_tensor"}
DATA = [[9, 1, 1, 1], [3, 3, 3, 3]]
RIGHT = {"user": "scheduler", "passwd": "word"}


def front_end(make: Make, *, eplb: dict[str, Any] | None = None, is_on: bool = True, **options: Any) -> FrontEnd:
    made = make(**options)
    context = made.app.state.context
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=is_on)
    engine = dataclasses.replace(context.config.engine, parallel=parallel)
    config = dataclasses.replace(context.config, engine=engine, eplb=EplbConfig(**(eplb or {})))
    made.app.state.context = dataclasses.replace(context, config=config)
    return made


def in_run(front: FrontEnd, **run: Any) -> None:
    front.client.controlled.replies["experts"] = {"run": {**RUN, **run}}


def rebalances(front: FrontEnd) -> list[dict[str, Any]]:
    return [arguments for kind, arguments in front.client.controlled.calls if kind == "rebalance_experts"]


def refused(response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    reply = response.json()
    assert set(reply) == {"code", "msg"}
    assert reply["code"] == 1
    assert words in reply["msg"]


# -------------------------------------------------------------------------------------------------------- who may call


@pytest.mark.parametrize("path", [START, STATS, CHECK])
async def test_the_checks_come_in_fastdeploy_s_order(make: Make, path: str) -> None:
    login = {"eplb_user": "scheduler", "eplb_password": "word"}
    wrong = {"user": "scheduler", "passwd": "no", "action": "no", "run": 5}
    refused(await front_end(make, eplb=login, is_on=False).post(path, wrong), 400, "--enable-expert-parallel")
    front = front_end(make, eplb=login, host="192.0.2.7")
    for body in (wrong, {"passwd": "word"}, {"user": "scheduler"}, {**RIGHT, "passwd": ["word"]}, {}, None):
        refused(await front.post(path, body), 401, "passwd")
    assert not front.client.controlled.calls
    refused(await front.post(path, {**wrong, **RIGHT}), 400, "run")
    refused(await front.http.post(path, content=b"{"), 400, "JSON")


async def test_a_login_and_a_key_both_open(make: Make) -> None:
    front = front_end(
        make,
        eplb={"eplb_user": "scheduler", "eplb_password": "word"},
        host="192.0.2.7",
        server={"admin_key": ("admin-1",), "api_key": ("user-1",)},
    )
    assert (await front.post(STATS, RIGHT)).status_code == 200
    assert (await front.post(STATS, {}, headers={"x-api-key": "admin-1"})).status_code == 200
    assert (await front.post(STATS, {}, headers={"x-api-key": "user-1"})).status_code == 401


@pytest.mark.parametrize("half", [{"eplb_user": "scheduler"}, {"eplb_password": "word"}])
def test_half_a_login_is_none(half: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--eplb-password"):
        create_app(FakeClient(), byte_tokenizer(), ServeConfig(eplb=EplbConfig(**half)), served_names=("fake",))


async def test_without_a_login_it_is_a_control_route(make: Make) -> None:
    """And an empty user with an empty password, FastDeploy's default, opens nothing from elsewhere."""
    empty = {"user": "", "passwd": ""}
    assert (await front_end(make).post(STATS, empty)).status_code == 200
    response = await front_end(make, host="192.0.2.7").post(STATS, empty)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    keyed = front_end(make, server={"admin_key": ("admin-1",), "api_key": ("user-1",)})
    refused(await keyed.post(STATS, empty), 401, "admin key")
    assert (await keyed.post(STATS, empty, headers={"x-api-key": "user-1"})).status_code == 403
    assert (await keyed.post(STATS, empty, headers={"x-api-key": "admin-1"})).status_code == 200


async def test_a_model_without_experts_is_refused_as_if_it_were_off(make: Make) -> None:
    front = front_end(make)
    front.client.controlled.errors |= dict.fromkeys(("experts", "expert_tokens"), Conflict("no experts"))
    for path in (START, STATS, CHECK):
        refused(await front.post(path, {}), 400, "no experts")


# ------------------------------------------------------------------------------------------------------ each of them


async def test_statistics(make: Make) -> None:
    front = front_end(make)
    for body, clear in (({}, False), ({"clear_stat": True}, True), ({"clear_stat": 1}, True)):
        reply = await front.post(STATS, body)
        assert reply.json() == {"code": 0, "msg": "ok", "data": EXPERT_TOKENS}
        assert front.client.controlled.last == ("expert_tokens", {"clear": clear})


@pytest.mark.parametrize(
    ("run", "word", "result"),
    [
        ({"state": "open"}, "DOING", 0),
        ({"state": "moving"}, "DOING", 0),
        ({"state": "staged"}, "LOAD_SUCC", 1),
        ({"outcome": "committed", "ended": "now"}, "DONE", 1),
        ({"outcome": "committed", "ended": 100.0}, "FREE", 1),
        ({"outcome": "aborted", "ended": "now"}, "FREE", -1),
        ({"outcome": "failed", "ended": "now"}, "FREE", -1),
        (None, "FREE", 0),
    ],
)
async def test_state(make: Make, run: dict[str, Any] | None, word: str, result: int) -> None:
    front = front_end(make)
    if run is not None:
        in_run(front, **{**run, "ended": time.time() if run.get("ended") == "now" else run.get("ended")})
    assert (await front.post(CHECK)).json() == {"code": 0, "msg": "ok", "status": word}
    loading = {"action": "check_load_weight_result"}
    assert (await front.post(CHECK, loading)).json() == {"code": 0, "msg": "ok", "data": [result] * 2}
    if run is not None:
        assert (await front.post(CHECK, {**loading, "run": "run-1"})).json()["data"] == [result] * 2
        assert front.client.controlled.last == ("experts", {"run": "run-1"})
    assert (await front.post(CHECK, {**loading, "run": "another"})).json()["data"] == [-1, -1]


async def test_workloads(make: Make) -> None:
    front = front_end(make)
    in_run(front, state="free", outcome="committed", ended=200.0, stall_s=0.0125)
    reply = (await front.post(CHECK, {"check_get_workloads": True})).json()
    assert list(reply) == ["code", "msg", "status", "data"]
    assert reply["data"] == {
        "update_timestamp": 200.0,
        "tokens_per_expert_stats_list": EXPERTS["tokens"],
        "ep_rank_to_expert_id_list": EXPERTS["slots"],
        "expert_id_to_ep_rank_array": [[[0, 4], [1, 5], [2, -1], [3, -1]]] * 2,
        "expert_in_rank_num_list": [[2, 2, 1, 1]] * 2,
        "cost_milliseconds": 12,
    }
    refused(await front.post(CHECK, {"action": "look"}), 400, "check_load_weight_result")


async def test_loads_are_staged_in_the_background(make: Make) -> None:
    front = front_end(make, eplb={"eplb_timeout": 7.0})
    assert (await front.post(START, {**RECV, "data": DATA, "run": "r"})).json() == {"code": 0, "msg": "ok"}
    begin, stage = rebalances(front)
    assert begin == {"action": "begin", "run": "r", "silence_s": 7.0}
    assert (stage["action"], stage["run"], stage["tokens"], stage["wait"]) == ("stage", "r", DATA, False)
    assert (await front.post(START, {**RECV, "data": DATA})).status_code == 200  # as FastDeploy sends it
    assert rebalances(front)[-1]["run"].startswith("run-")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "missing"),
        ({}, "no list"),
        ([], "2 lists"),
        ([[1, 2, 3, 4]], "2 lists"),
        ([[1, 2, 3, 4], [1, 2, 3]], "4 numbers"),
        ([[1, 2, 3, 4], [1, 2, 3, -1]], "2^53"),
        ([[1, 2, 3, 4], [1, 2, 3, 0.5]], "int"),
        ([1, 2], "array"),
    ],
)
async def test_loads_of_another_shape(make: Make, data: Any, words: str) -> None:
    front = front_end(make)
    refused(await front.post(START, {**RECV, "data": data}), 400, words)
    assert not rebalances(front)


async def test_each_step_needs_its_status(make: Make) -> None:
    front = front_end(make)
    refused(await front.post(START, GO), 400, "FREE")
    for state in ("open", "moving", "staged"):
        in_run(front, state=state)
        refused(await front.post(START, {"ips": ["h:1"]}), 400, "must be FREE")
        refused(await front.post(START, {**RECV, "data": DATA}), 400, "must be FREE")
        assert not rebalances(front)
    assert (await front.post(START, GO)).json() == {"code": 0, "msg": "ok"}
    assert (await front.post(START, {**GO, "run": "run-1"})).status_code == 200
    assert rebalances(front) == [{"action": "commit"}, {"action": "commit", "run": "run-1"}]
    in_run(front, state="open")
    assert (await front.post(START, {**RECV, "data": DATA, "run": "run-1"})).status_code == 200  # the leader's own
    front.client.controlled.errors["rebalance_experts"] = Conflict("There is no run x.", code="stale_run")
    in_run(front, state="staged")
    refused(await front.post(START, {**GO, "run": "x"}), 400, "no run x")


async def test_abort(make: Make) -> None:
    front = front_end(make)
    refused(await front.post(START, {"action": "abort"}), 400, "run")
    assert (await front.post(START, {"action": "abort", "run": "x"})).status_code == 200  # nothing to end
    in_run(front, state="staged")
    await front.post(START, {"action": "abort", "run": "x"})  # another one
    assert not rebalances(front)
    await front.post(START, {"action": "abort", "run": "run-1"})
    assert rebalances(front) == [{"action": "abort", "run": "run-1"}]
    in_run(front, state="moving")
    running = (await front.post("/v1/control/rebalance_experts", {"action": "stage", "wait": False})).json()
    front.client.controlled.replies["status"] = {"operation": running}
    await front.post(START, {"action": "abort", "run": "run-1"})
    assert ("cancel", {"id": running["id"]}) in front.client.controlled.calls


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "missing"),
        ({"ips": []}, 400, "at least one"),
        ({"ips": "h:1"}, 400, "list"),
        ({"ips": ["h:1", "h"]}, 400, "ips[1]"),
        ({"ips": ["h:0"]}, 400, "host:port"),
        ({"ips": ["h:65536"]}, 400, "host:port"),
        ({"ips": ["h:1/x"]}, 400, "host:port"),
        ({"ips": ["u@h:1"]}, 400, "host:port"),
        ({"ips": [5]}, 400, "host:port"),
        ({"ips": ["h:1", "h:1"]}, 400, "twice"),
        ({"ips": [f"h:{port}" for port in range(10_000, 10_130)]}, 500, "1024"),
        ({"action": "unknown"}, 400, "recv_expert_weight"),
        ({"action": 5}, 400, "action"),
    ],
)
async def test_starts_that_are_refused(make: Make, body: dict[str, Any], status: int, words: str) -> None:
    front = front_end(make)
    refused(await front.post(START, body), status, words)
    assert not rebalances(front)


VALUES = [
    "null", "true", "-1", "0.5", "1e999", "9223372036854775808", "1" + "0" * 400, '""', '"x"', '"\\u0000"', "[null]",
    "[[]]", "[[1e99]]", '["\\udc00"]', "[{}]", "{}", '"' + "9" * 5000 + '"', "[" * 5000, '["a:1", 5]',
    "[[1,2,3,4],[5]]",
]  # fmt: skip


@pytest.mark.parametrize("action", ["", "recv_expert_weight", "update_weight_from_tensor", "abort"])
async def test_no_field_makes_a_5xx(make: Make, action: str) -> None:
    front = front_end(make)
    for path in (START, STATS, CHECK):
        for name in ("user", "passwd", "run", "ips", "data", "clear_stat", "check_get_workloads", "action"):
            for value in VALUES:
                right = {} if name == "action" else {"action": f'"{action}"'}
                content = ", ".join(f'"{key}": {text}' for key, text in {**right, name: value}.items())
                response = await front.http.post(path, content=f"{{{content}}}")
                assert response.status_code in (200, 400), (path, name, value[:60], response.text)
                assert response.json()["code"] == int(response.status_code == 400)
    assert not front.app.state.context.tasks


async def test_a_start_is_led_after_the_reply(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    led: list[eplb_run.Peers] = []
    begun = asyncio.Event()

    async def lead(_: Any, peers: eplb_run.Peers) -> None:
        led.append(peers)
        await begun.wait()

    monkeypatch.setattr(eplb_run, "lead", lead)
    addresses = ["h:1", "[::1]:2"]
    front = front_end(make, eplb={"eplb_user": "scheduler", "eplb_password": "word"}, server={"admin_key": ("key",)})
    response = await front.post(START, {"ips": addresses, **RIGHT}, headers={"x-api-key": "key"})
    assert response.json() == {"code": 0, "msg": "ok"}
    (task,) = front.app.state.context.tasks
    begun.set()
    await task
    (peers,) = led
    assert rebalances(front) == [{"action": "begin", "run": peers.run_id, "silence_s": 60.0}]
    assert (peers.addresses, peers.credentials, peers.headers) == (
        addresses,
        {"user": "scheduler", "passwd": "word"},
        {},
    )
    assert "word" not in repr(peers)
    keyed = front_end(make, server={"admin_key": ("key",)})
    await keyed.post(START, {"ips": addresses}, headers={"x-api-key": "key"})
    await asyncio.gather(*keyed.app.state.context.tasks)
    assert (led[1].credentials, led[1].headers) == ({"user": "", "passwd": ""}, {"x-api-key": "key"})


# -------------------------------------------------------------------------------------------------- SGLang's recorder


async def test_the_recorder_of_sglang(make: Make) -> None:
    front = make()
    for method in ("GET", "POST"):
        started = await front.http.request(method, "/start_expert_distribution_record")
        assert (started.status_code, started.json()["success"]) == (200, True)
        assert front.client.controlled.last == ("experts", {"clear": True})
        assert (await front.http.request(method, "/stop_expert_distribution_record")).status_code == 200
        dumped = (await front.http.request(method, "/dump_expert_distribution_record")).json()
        assert (dumped["logical_count"], dumped["layers"]) == (EXPERTS["tokens"], [1, 2])
    front.client.controlled.errors["experts"] = Conflict("no experts")
    for verb in ("start", "stop", "dump"):
        response = await front.post(f"/{verb}_expert_distribution_record")
        assert (response.status_code, response.json()["success"]) == (400, False)
