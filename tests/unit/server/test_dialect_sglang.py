"""SGLang's routes: what each asks of the engine, and what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Conflict, InvalidRequest
from headrace.testing.dialects import GROUP_SOURCE, ONE_TENSOR, OPEN_REFRESH, PICKLED, dialect_front_end, kinds
from headrace.testing.dialects import operations as operations_of

JOIN = {"master_address": "10.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
JOINED = {
    "host": "10.0.0.1",
    "port": 29500,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "weight_update_group",
    "backend": "gloo",
}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/pause_generation", None, ("pause", {"mode": "abort"})),
        ("/pause_generation", {"mode": "retract"}, ("pause", {"mode": "keep", "recompute": True})),
        ("/pause_generation", {"mode": "in_place", "other": 1}, ("pause", {"mode": "keep"})),
        ("/continue_generation", {}, ("resume", {})),
        ("/continue_generation", None, ("resume", {})),
        ("/flush_cache", None, ("reset_prefix_cache", {})),
        ("/release_memory_occupation", {}, ("sleep", {"mode": "keep"})),
        ("/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]},
         ("sleep", {"tags": ["kv_cache"], "mode": "keep"})),
        ("/resume_memory_occupation", {"tags": None}, ("wake", {})),
        ("/resume_memory_occupation", {"tags": ["weights"]}, ("wake", {"tags": ["weights"]})),
        ("/destroy_weights_update_group", {"group_name": "g"}, ("leave_group", {"group_name": "g"})),
        ("/update_weight_version", {"new_version": 5}, ("set_version", {"version": "5"})),
        ("/get_weights_by_name", {"name": "a", "truncate_size": 2}, ("get_weight", {"name": "a", "max_values": 2})),
        ("/update_weights_from_disk", {"model_path": "/m"},
         ("refresh_weights", {"source": {"kind": "path", "path": "/m"}})),
        ("/update_weights_from_disk",
         {"model_path": "/m", "abort_all_requests": True, "flush_cache": False, "weight_version": 3},
         ("refresh_weights",
          {"source": {"kind": "path", "path": "/m"}, "version": "3", "mode": "abort", "kv": "keep"})),
    ],
)  # fmt: skip
async def test_one_operation(path: str, body: Any, expected: tuple[str, dict[str, Any]]) -> None:
    front_end = dialect_front_end()
    response = await (front_end.http.post(path) if body is None else front_end.post(path, body))
    assert response.status_code == 200, response.text
    assert operations_of(front_end) == [expected]
    if isinstance(response.json(), dict):
        assert response.json().get("success", True) is True
        assert response.json()["message"]


async def test_joining_a_group() -> None:
    front_end = dialect_front_end()
    assert (await front_end.post("/init_weights_update_group", JOIN)).json()["success"] is True
    assert operations_of(front_end) == [("leave_group", {"group_name": "weight_update_group"}), ("join_group", JOINED)]


async def test_replies_with_more_in_them() -> None:
    front_end = dialect_front_end(is_paused=True, num_waiting=4, version="12")
    body = (await front_end.post("/update_weights_from_disk", {"model_path": "/m"})).json()
    assert body["num_paused_requests"] == 4
    assert (await front_end.post("/update_weight_version", {"new_version": "v"})).json()["new_version"] == "v"
    assert (await front_end.post("/continue_generation")).json()["status"] == "ok"
    assert (await front_end.http.get("/get_weight_version")).json() == {"weight_version": "12"}
    assert (await front_end.http.get("/get_weights_by_name?name=a&truncate_size=2")).json() == [1.0, 2.0]
    assert (await front_end.http.get("/model_info")).json()["weight_version"] == "12"
    info = (await front_end.http.get("/get_server_info")).json()
    assert (info["tp_size"], info["internal_states"][0]["is_paused"]) == (1, True)
    loads = (await front_end.http.get("/v1/loads?include=core")).json()
    assert (loads["loads"][0]["num_reqs"], loads["aggregate"]["num_waiting_reqs"]) == (4, 4)
    assert (await front_end.http.get("/get_load")).json()[0]["num_reqs"] == 4
    assert (await front_end.post("/post_process_weights", {"post_process_quantization": True})).status_code == 200


@pytest.mark.parametrize(
    ("flags", "paused", "missing", "commits"),
    [
        ({"flush_cache": True}, False, 0, True),
        ({"flush_cache": True}, True, 0, True),
        ({"flush_cache": True}, False, 3, False),
        ({"flush_cache": False}, False, 0, False),
        ({}, False, 0, True),
        ({}, False, 3, False),
        ({}, True, 0, False),  # AReaL: /continue_generation commits
    ],
)
async def test_which_bucket_commits(flags: dict[str, Any], paused: bool, missing: int, commits: bool) -> None:
    front_end = dialect_front_end(is_paused=paused, missing=missing)
    body = {**ONE_TENSOR, **flags, "weight_version": 8}
    response = await front_end.post("/update_weights_from_distributed", body)
    assert (response.status_code, response.json()["success"]) == (200, True)
    begin, apply, *rest = operations_of(front_end)
    assert (begin, apply) == (("begin_refresh", {}), ("apply_refresh", {"source": GROUP_SOURCE}))
    assert rest == ([("commit_refresh", {"version": "8"})] if commits else [])
    assert ("staged" in response.json()["message"]) is not commits


async def test_a_bucket_joins_an_open_refresh_and_aborts_where_it_says_so() -> None:
    front_end = dialect_front_end(refresh=OPEN_REFRESH)
    await front_end.post("/update_weights_from_distributed", {**ONE_TENSOR, "abort_all_requests": True})
    assert operations_of(front_end)[1:] == [("commit_refresh", {"mode": "abort"})]
    assert kinds(front_end) == ["apply_refresh", "commit_refresh"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/continue_generation", {}, [("commit_refresh", {}), ("resume", {})]),
        ("/flush_cache", {}, [("commit_refresh", {})]),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]},
         [("commit_refresh", {}), ("wake", {"tags": ["kv_cache"]})]),
        ("/resume_memory_occupation", {"tags": ["weights"]}, [("wake", {"tags": ["weights"]})]),
        ("/update_weight_version", {"new_version": "v9"}, [("commit_refresh", {"version": "v9"})]),
        ("/reset_prefix_cache", None, [("commit_refresh", {})]),
    ],
)  # fmt: skip
async def test_what_commits_an_open_refresh(path: str, body: Any, expected: Any) -> None:
    front_end = dialect_front_end(refresh=OPEN_REFRESH, num_running=3)
    assert (await front_end.post(path, body)).status_code == 200
    assert operations_of(front_end) == expected


async def test_a_pickle_goes_to_a_file_that_is_gone_afterwards() -> None:
    front_end = dialect_front_end(allow_pickles=True)
    body = {"serialized_named_tensors": [PICKLED], "load_format": "flattened_bucket", "flush_cache": False}
    assert (await front_end.post("/update_weights_from_tensor", body)).status_code == 200
    source = operations_of(front_end)[1][1]["source"]
    path = source.pop("file")
    assert source == {"kind": "file", "format": "pickle", "delete": True, "load_format": "flattened_bucket"}
    assert not await asyncio.to_thread(Path(path).exists)


@pytest.mark.parametrize(
    ("body", "allow", "code"),
    [
        ({"serialized_named_tensors": [PICKLED]}, False, "pickles_refused"),
        ({"serialized_named_tensors": ["?" * 8]}, True, "invalid_value"),
        ({"serialized_named_tensors": ["\u00e9"]}, True, "invalid_value"),
        ({"serialized_named_tensors": []}, True, "invalid_value"),
        ({}, True, "missing_field"),
    ],
)
async def test_pickles_that_are_not_taken(body: Any, allow: bool, code: str) -> None:
    front_end = dialect_front_end(allow_pickles=allow)
    response = await front_end.post("/update_weights_from_tensor", body)
    reply = response.json()
    assert (response.status_code, reply["success"], reply["error"]["code"]) == (400, False, code)
    assert not operations_of(front_end)


@pytest.mark.parametrize(
    ("path", "failing"),
    [
        ("/update_weights_from_distributed", "apply_refresh"),
        ("/update_weights_from_distributed", "commit_refresh"),
        ("/update_weights_from_disk", "refresh_weights"),
    ],
)
async def test_a_failure_ends_the_refresh_and_says_which_weights_serve(path: str, failing: str) -> None:
    body = {**ONE_TENSOR, "flush_cache": True, "model_path": "/m"}
    for state, words in (("ready", "the old weights (version 0) serve on"), ("poisoned", "poisoned: half there")):
        errors = {failing: InvalidRequest("tensor 'x' is unknown.")}
        front_end = dialect_front_end(errors=errors, state=state, reason="half there")  # type: ignore[arg-type]
        response = await front_end.post(path, body)
        assert (response.status_code, response.json()["success"]) == (400, False)
        assert "tensor 'x' is unknown. " in response.json()["message"]
        assert words in response.json()["message"]
        assert kinds(front_end)[-1] == "abort_refresh"


async def test_a_conflict_leaves_the_refresh_alone() -> None:
    front_end = dialect_front_end(errors={"apply_refresh": Conflict("wake (op-1) is running")})
    response = await front_end.post("/update_weights_from_distributed", ONE_TENSOR)
    assert (response.status_code, response.json()["message"]) == (400, "wake (op-1) is running")
    assert kinds(front_end)[-1] == "apply_refresh"


async def test_what_needs_an_idle_server() -> None:
    busy = dialect_front_end(num_running=2)
    for path in ("/flush_cache", "/release_memory_occupation"):
        response = await busy.http.post(path)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "not_idle")
    assert not operations_of(busy)
    assert (await dialect_front_end(num_running=2, is_paused=True).http.get("/flush_cache")).status_code == 200


async def test_aborts() -> None:
    front_end = dialect_front_end()
    assert (await front_end.post("/abort_request", {"rid": "x"})).json()["aborted"] == 3
    await front_end.post("/abort_request", {"rid": "", "abort_all": True})
    assert (await front_end.post("/abort_request", {})).status_code == 400
    await front_end.post("/update_weight_version", {"new_version": "1"})
    await front_end.post("/update_weight_version", {"new_version": "1", "abort_all_requests": True})
    assert front_end.client.aborts == [(None, ["x"], "control"), (None, None, "control"), (None, None, "control")]


async def test_the_checker() -> None:
    front_end = dialect_front_end()
    found = (await front_end.post("/weights_checker", {"action": "checksum"})).json()
    assert (found["success"], found["checksums"]) == (True, {"a": "01", "b": "02"})
    same = await front_end.post("/weights_checker", {"action": "compare", "baseline": found["checksums"]})
    assert same.json()["match"] is True
    other = await front_end.post("/weights_checker", {"action": "compare", "baseline": {"a": "01", "b": "03"}})
    assert (other.status_code, other.json()["success"]) == (400, False)
    for action in ("snapshot", "reset_tensors", "other"):
        assert (await front_end.post("/weights_checker", {"action": action})).status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "/update_weights_from_ipc",
        "/pull_weights",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
    ],
)
async def test_what_cannot_be_served_says_so(path: str) -> None:
    response = await dialect_front_end().post(path, {"zmq_handles": {}})
    assert response.status_code == 400
    assert (response.json()["success"], response.json()["error"]["code"]) == (False, "not_available")
    assert path in response.json()["message"]


async def test_bad_bodies() -> None:
    front_end = dialect_front_end()
    for path, body in (
        ("/pause_generation", {"mode": "keep"}),
        ("/init_weights_update_group", {**JOIN, "master_port": "x"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_distributed", {"names": ["a"]}),
        ("/get_weights_by_name", {"name": "a", "truncate_size": 0}),
    ):
        response = await front_end.post(path, body)
        assert (response.status_code, response.json()["success"]) == (400, False), path
    assert not operations_of(front_end)
