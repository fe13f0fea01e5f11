"""vLLM's routes, and those of LMDeploy, TRL and AReaL that stand beside them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.testing.dialects import GROUP_SOURCE, ONE_TENSOR, OPEN_REFRESH, PICKLED, dialect_front_end, kinds
from headrace.testing.dialects import operations as operations_of
from headrace.testing.fake_control import operation_object

INIT = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
JOINED = {"host": "10.0.0.1", "port": 29500, "rank_offset": 1, "world_size": 2, "group_name": "weight_update_group"}
UPDATE = {"names": ["a"], "dtype_names": ["torch.bfloat16"], "shapes": [[2, 3]]}


@pytest.mark.parametrize(
    ("path", "body", "expected", "reply"),
    [
        ("/pause?mode=keep", None, [("pause", {"mode": "keep", "clear_cache": True})], {"status": "paused"}),
        ("/pause?clear_cache=false", None, [("pause", {"mode": "abort", "clear_cache": False})], {"status": "paused"}),
        ("/pause?wait_for_inflight_requests=true", None, [("pause", {"mode": "wait", "clear_cache": True})],
         {"status": "paused"}),
        ("/resume", None, [("resume", {})], {"status": "resumed"}),
        ("/start_weight_update", {"is_checkpoint_format": True}, [("begin_refresh", {})],
         {"message": "Weight update started"}),
        ("/update_weights", {"update_info": UPDATE},
         [("begin_refresh", {}), ("apply_refresh", {"source": GROUP_SOURCE})], {"message": "Weights updated"}),
        ("/update_weights", {"update_info": {**UPDATE, "packed": True, "packed_num_buffers": 2}},
         [("begin_refresh", {}), ("apply_refresh", {"source": {**GROUP_SOURCE, "load_format": "packed"}})],
         {"message": "Weights updated"}),
        ("/finish_weight_update", None, [("commit_refresh", {})], {"message": "Weight update finished"}),
        ("/finish_weight_update", {"weight_version": 4}, [("commit_refresh", {"version": "4"})],
         {"message": "Weight update finished"}),
        ("/init_weight_transfer_engine", {"init_info": INIT},
         [("leave_group", {"group_name": "weight_update_group"}), ("join_group", JOINED)],
         {"message": "Weight transfer initialized"}),
        ("/weight_checker", {"action": "checksum"}, [("checksum", {})],
         {"checksums": {"a": "01", "b": "02"}, "total": "ff"}),
        ("/weight_checker", {"action": "compare", "path": "/m"}, [("compare", {"path": "/m"})],
         {"match": False, "mismatches": ["a"]}),
        ("/update_weight_version", {"new_version": "v"}, [("set_version", {"version": "v"})], None),
        ("/sleep", {}, [("sleep", {"mode": "abort"})], None),
        ("/sleep?level=2&mode=wait&tags=weights&tags=kv_cache", None,
         [("sleep", {"tags": ["weights", "kv_cache"], "mode": "wait"})], None),
        ("/sleep?level=0", None, [("pause", {"mode": "abort"})], None),
        ("/wake_up", None, [("wake", {}), ("resume", {})], None),
        ("/wake_up?tags=weights&tags=kv_cache", None, [("wake", {"tags": ["weights", "kv_cache"]})], None),
        ("/wake_up?tags=scheduling", None, [("resume", {})], None),
        ("/wakeup?tags=kv_cache", None, [("wake", {"tags": ["kv_cache"]})], None),
        ("/reset_prefix_cache?reset_running_requests=true", None, [("reset_prefix_cache", {})], None),
        ("/reset_mm_cache", None, [], None),
        ("/reset_encoder_cache", None, [], None),
    ],
)  # fmt: skip
async def test_each_route(path: str, body: Any, expected: Any, reply: Any) -> None:
    front_end = dialect_front_end()
    response = await (front_end.http.post(path) if body is None else front_end.post(path, body))
    assert response.status_code == 200, response.text
    assert operations_of(front_end) == expected
    if reply is not None:
        assert response.json() == reply


async def test_questions() -> None:
    front_end = dialect_front_end(is_paused=True, asleep=["weights"], version="default")
    for path, reply in (
        ("/is_paused", {"is_paused": True}),
        ("/is_sleeping", {"is_sleeping": True}),
        ("/weight_info", {"weight_version": "default"}),
        ("/get_world_size?include_dp=true", {"world_size": 1}),
        ("/get_world_size/", {"world_size": 1}),
    ):
        assert (await front_end.http.get(path)).json() == reply


async def test_aborts() -> None:
    front_end = dialect_front_end()
    assert (await front_end.post("/abort_requests", {})).json() == {"status": "aborted", "aborted": 3}
    await front_end.http.post("/abort_requests")
    await front_end.post("/inference/v1/abort_requests", {"request_ids": ["x"]})
    assert (await front_end.post("/inference/v1/abort_requests", {})).status_code == 400
    assert front_end.client.aborts == [(None, None, "control"), (None, None, "control"), (None, ["x"], "control")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights", {}),
        ("/update_weights", {"update_info": {}}),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}),
        ("/update_weights", {"serialized_named_tensors": PICKLED}),
        ("/sleep?level=7", {}),
        ("/sleep?level=x", {}),
        ("/pause?clear_cache=maybe", {}),
        ("/collective_rpc", {}),
        ("/collective_rpc", {"method": "__init__"}),
        ("/collective_rpc", {"method": "update_weights_from_ipc", "args": [{"GPU-1": "ipc:///x"}], "timeout": 300}),
        ("/collective_rpc", {"method": "update_weight", "args": ["a"]}),
        ("/weight_checker", {"action": "reset"}),
        ("/start_draft_weight_update", {}),
        ("/v1/load_lora_adapter", {"lora_name": "x"}),
        ("/scale_elastic_ep", {}),
    ],
)
async def test_refusals(path: str, body: Any) -> None:
    front_end = dialect_front_end()
    response = await front_end.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert not operations_of(front_end)


async def test_lmdeploy_s_update_commits_with_finished() -> None:
    front_end = dialect_front_end(allow_pickles=True)
    body = {"serialized_named_tensors": PICKLED, "load_format": None, "finished": False}
    response = await front_end.post("/update_weights", body)
    assert (response.status_code, response.json()) == (200, None)
    await front_end.post("/update_weights", {**body, "finished": True})
    assert kinds(front_end) == ["begin_refresh", "apply_refresh", "begin_refresh", "apply_refresh", "commit_refresh"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"method": "init_process_group", "args": ["10.0.0.1", 29500, 1, 2, "openrlhf", "gloo", False]},
         [("leave_group", {"group_name": "openrlhf"}),
          ("join_group", {**JOINED, "group_name": "openrlhf", "backend": "gloo"})]),
        ({"method": "update_weight", "args": ["a", "torch.bfloat16", [2, 3]], "kwargs": {"empty_cache": True}},
         [("begin_refresh", {}), ("apply_refresh", {"source": {**GROUP_SOURCE, "group_name": "openrlhf"}})]),
        ({"method": "reload_weights", "kwargs": {"weights_path": "/m"}},
         [("refresh_weights", {"source": {"kind": "path", "path": "/m"}})]),
        ({"method": "update_weights", "args": ["/m"]},
         [("refresh_weights", {"source": {"kind": "path", "path": "/m"}})]),
        ({"method": "reset_prefix_cache"}, [("reset_prefix_cache", {})]),
        ({"method": "sleep", "kwargs": {"level": 2}}, [("sleep", {})]),
        ({"method": "wake_up", "args": [["weights"]]}, [("wake", {"tags": ["weights"]})]),
        ({"method": "destroy_process_group"}, [("leave_group", {"group_name": "openrlhf"})]),
    ],
)  # fmt: skip
async def test_collective_rpc(call: dict[str, Any], expected: Any) -> None:
    front_end = dialect_front_end()
    response = await front_end.post("/collective_rpc", call)
    assert (response.status_code, response.json()) == (200, {"results": [None]}), response.text
    assert operations_of(front_end) == expected


@pytest.mark.parametrize("slash", ["", "/"])
async def test_trl_s_own_server(slash: str) -> None:
    front_end = dialect_front_end()
    body = {"host": "0.0.0.0", "port": "51216", "world_size": 2, "client_device_uuid": "GPU-1"}
    assert (await front_end.post("/init_communicator" + slash, body)).status_code == 200
    param = {"name": "a", "dtype": "torch.bfloat16", "shape": [2, 3]}
    front_end.client.controlled.operations["op-2"]["state"] = "succeeded"  # the trainer has joined
    assert (await front_end.post("/update_named_param" + slash, param)).status_code == 200
    assert (await front_end.post("/close_communicator" + slash)).status_code == 200
    joined = {"host": "0.0.0.0", "port": 51216, "rank_offset": 0, "world_size": 2, "wait": False}
    assert operations_of(front_end)[1:] == [
        ("join_group", {**joined, "group_name": "weight_update_group"}),
        ("begin_refresh", {}),
        ("apply_refresh", {"source": GROUP_SOURCE | {"src": -1}, "wait": False}),
        ("leave_group", {"group_name": "weight_update_group"}),
    ]


async def test_trl_s_health_is_ours() -> None:
    response = await dialect_front_end().http.get("/health/")
    assert (response.status_code, response.json()["status"]) == (200, "ready")


async def test_what_went_wrong_in_the_background_is_told_by_the_next_call() -> None:
    for path, body in (("/reset_prefix_cache/", None), ("/areal_update_weights_xccl", {})):
        front_end = dialect_front_end(refresh=OPEN_REFRESH)
        failed = {**operation_object("apply_refresh", state="failed"), "error": {"message": "the sender is gone"}}
        front_end.client.controlled.operations["op-1"] = failed
        response = await front_end.post(path, body)
        assert response.status_code == 400
        assert "apply_refresh op-1 failed: the sender is gone" in response.text
        assert kinds(front_end) == ["abort_refresh"]


async def test_areal() -> None:
    front_end = dialect_front_end()
    success = {"success": True}
    join = {**INIT, "master_port": "29500", "backend": "nccl", "group_name": "g"}
    calls: list[tuple[str, Any]] = [
        ("/areal_init_weights_update_group", join),
        ("/areal_pause_generation", {}),
        ("/areal_set_update_weight_meta", {**ONE_TENSOR, "group_name": "g"}),
    ]
    for path, body in calls:
        assert success.items() <= (await front_end.post(path, body)).json().items(), path
    front_end.client.controlled.operations["op-5"]["state"] = "succeeded"  # the tensors are there
    assert (await front_end.post("/areal_update_weights_xccl", {})).json()["success"] is True
    front_end.client.controlled.replies["status"]["refresh"] = OPEN_REFRESH
    assert (await front_end.http.post("/areal_continue_generation")).json()["success"] is True
    assert operations_of(front_end) == [
        ("leave_group", {"group_name": "g"}),
        ("join_group", {**JOINED, "backend": "nccl", "group_name": "g"}),
        ("pause", {"mode": "abort", "clear_cache": True}),
        ("begin_refresh", {}),
        ("apply_refresh", {"source": {**GROUP_SOURCE, "group_name": "g"}, "wait": False}),
        ("commit_refresh", {}),
        ("resume", {}),
    ]


async def test_areal_from_disk_and_adapters() -> None:
    front_end = dialect_front_end()
    assert (await front_end.post("/areal_update_weights", {"model_path": "/m"})).json()["success"] is True
    assert operations_of(front_end) == [("refresh_weights", {"source": {"kind": "path", "path": "/m"}})]
    response = await front_end.post("/areal_update_weights_lora", {})
    assert (response.status_code, response.json()["success"]) == (400, False)
