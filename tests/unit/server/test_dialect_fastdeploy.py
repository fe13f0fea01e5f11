"""FastDeploy's control routes, and that every dialect's routes want an admin."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import APIRoute

from headrace.errors import Conflict
from headrace.server.dialects import dialect_routers
from headrace.testing.dialects import dialect_front_end
from headrace.testing.dialects import operations as operations_of
from headrace.testing.front_end import make_front_end

MODEL = {"kind": "path", "path": "/m"}


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("/v1/pause", None, {}, [("pause", {"mode": "abort"})]),
        ("/v1/resume", {}, {}, [("resume", {})]),
        ("/v1/sleep?tags=weight,kv_cache", None, {},
         [("pause", {"mode": "abort"}), ("sleep", {"tags": ["weights", "kv_cache"]})]),
        ("/v1/sleep", {"tags": "weight"}, {}, [("pause", {"mode": "abort"}), ("sleep", {"tags": ["weights"]})]),
        ("/v1/wakeup", None, {}, [("wake", {}), ("resume", {})]),
        ("/v1/wakeup", {"tags": ["kv_cache"]}, {"asleep": ["weights"]}, [("wake", {"tags": ["kv_cache"]})]),
        ("/v1/update_weights", {"version": 3, "path": "/m"}, {"is_paused": True},
         [("refresh_weights", {"source": MODEL, "version": "3"})]),
        ("/v1/update_weights", None, {"is_paused": True},
         [("refresh_weights", {"source": {"kind": "path", "path": "smollm2"}})]),
        ("/v1/abort_requests", {"abort_all": True}, {}, []),
    ],
)  # fmt: skip
async def test_each_route(path: str, body: Any, status: dict[str, Any], expected: Any) -> None:
    front_end = dialect_front_end(**status)
    response = await (front_end.http.post(path) if body is None else front_end.post(path, body))
    reply = response.json()
    assert (response.status_code, reply["status"], reply["error_message"]) == (200, "success", None)
    assert reply["request_id"].startswith("control-")
    assert operations_of(front_end) == expected


async def test_is_paused() -> None:
    reply = (await dialect_front_end(is_paused=True).http.get("/v1/is_paused")).json()
    assert (reply["is_paused"], reply["result"]) == (True, {"is_paused": True})


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/update_weights", {"path": "/m"}, 409),  # not paused
        ("/v1/update_weights", {"rsync_config": {}}, 400),
        ("/v1/abort_requests", {}, 400),
        ("/v1/abort_requests", {"req_ids": []}, 400),
        ("/v1/pause", {}, 409),
    ],
)
async def test_errors(path: str, body: Any, code: int) -> None:
    front_end = dialect_front_end(errors={"pause": Conflict("wake (op-1) is running")})
    response = await front_end.post(path, body)
    assert (response.status_code, response.json()["status"], response.json()["result"]) == (code, "error", None)
    assert response.json()["error_message"]


async def test_a_checksum_that_does_not_match_is_an_error() -> None:
    front_end = dialect_front_end(is_paused=True)
    response = await front_end.post("/v1/update_weights", {"path": "/m", "verify_checksum": True})
    assert response.status_code == 500
    assert "'a'" in response.json()["error_message"]


CLEAR, UPDATE = "/clear_load_weight", "/update_model_weight"
SLEEPING = {"operation": {"id": "op-1", "kind": "sleep", "started": 1.0}}
WAKING = {"operation": {"id": "op-1", "kind": "wake", "started": 1.0}}


@pytest.mark.parametrize(
    ("path", "status", "code", "expected"),
    [
        (CLEAR, {}, 200, [("sleep", {})]),
        (CLEAR, {"asleep": ["weights", "kv_cache"]}, 200, []),
        (CLEAR, SLEEPING, 400, []),
        (CLEAR, WAKING, 403, []),
        (CLEAR, {"state": "updating"}, 403, []),
        (UPDATE, {}, 200, []),
        (UPDATE, {"asleep": ["weights", "kv_cache"]}, 200, [("wake", {})]),
        (UPDATE, WAKING, 400, []),
        (UPDATE, SLEEPING, 403, []),
    ],
)
async def test_the_older_pair(path: str, status: dict[str, Any], code: int, expected: Any) -> None:
    for method in ("GET", "POST"):
        front_end = dialect_front_end(**status)
        response = await front_end.http.request(method, path)
        assert response.status_code == code
        assert set(response.json()) == {"dp_rank", "local_dp_rank", "msg"}
        assert operations_of(front_end) == expected


async def test_the_older_pair_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.dialects.fastdeploy.LEGACY_TIMEOUT_S", 0.01)
    front_end = dialect_front_end()
    front_end.client.controlled.gate.clear()
    assert (await front_end.http.post(CLEAR)).status_code == 404


async def test_every_route_of_a_dialect_but_probes_wants_an_admin() -> None:
    abroad = make_front_end(host="192.0.2.7")
    num_routes = 0
    for router in dialect_routers():
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods - {"HEAD"}:
                num_routes += 1
                response = await abroad.http.request(method, route.path)
                expected = 200 if route.path == "/health/" else 403
                assert response.status_code == expected, route.path
                if expected == 403:
                    assert response.json()["error"]["code"] == "permission_denied"
    assert num_routes > 80
    assert not abroad.client.controlled.calls
