"""/v1/control: what each body becomes for the engine, what is refused, tensors as bodies, questions meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config.options import ControlConfig, EngineConfig, ServeConfig
from headrace.engine.control.operations import OPERATIONS as ENGINE_OPERATIONS
from headrace.engine.control.sources import Source
from headrace.errors import Conflict, InvalidRequest
from headrace.server import spool
from headrace.server.app import create_app
from headrace.server.protocol.sources import SOURCES
from headrace.server.routes.control import OPERATIONS, WITH_WEIGHTS
from headrace.testing.bytes import byte_tokenizer
from headrace.testing.fake_control import EXPERTS
from headrace.testing.front_end import FakeClient, FrontEnd, http_client

Make = Callable[..., FrontEnd]
LAYOUT = {"names": ["a", "b"], "dtypes": ["float32", "BF16"], "shapes": [[2, 3], [4]]}
SENT = b"tensors" * 100


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def frame(fields: dict[str, Any], tensors: bytes = SENT) -> bytes:
    header = json.dumps(fields).encode()
    return len(header).to_bytes(8, "little") + header + tensors


async def send_frame(front_end: FrontEnd, kind: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/octet-stream"}
    return await front_end.http.post(f"/v1/control/{kind}", content=content, headers=headers)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("pause", {}, {}),
        ("pause", {"mode": "keep", "clear_cache": True, "timeout_s": 5},
         {"mode": "keep", "clear_cache": True, "timeout_s": 5.0}),
        ("pause", {"mode": None, "wait": True, "unknown": 1}, {}),
        ("resume", {"wait": False}, {"wait": False}),
        ("sleep", {"tags": ["weights"], "mode": "wait"}, {"tags": ["weights"], "mode": "wait"}),
        ("wake", {"tags": None}, {}),
        ("begin_refresh", {"staged": "never", "delta": True, "mode": "abort"},
         {"staged": "never", "delta": True, "mode": "abort"}),
        ("commit_refresh", {"version": "7", "kv": "keep"}, {"version": "7", "kv": "keep"}),
        ("abort_refresh", {}, {}),
        ("set_version", {"version": "step 7"}, {"version": "step 7"}),
        ("checksum", {"names": ["a"]}, {"names": ["a"]}),
        ("compare", {"path": "/models/x"}, {"path": "/models/x"}),
        ("get_weight", {"name": "a", "max_values": 3}, {"name": "a", "max_values": 3}),
        ("join_group", {"host": "h", "port": 1, "rank_offset": 0, "world_size": 2, "backend": None},
         {"host": "h", "port": 1, "rank_offset": 0, "world_size": 2}),
        ("leave_group", {"group_name": "g"}, {"group_name": "g"}),
        ("reset_prefix_cache", {}, {}),
        ("rebalance_experts", {"action": "stage", "tokens": [[1, 2]], "run": "r", "silence_s": 5, "wait": False},
         {"action": "stage", "tokens": [[1, 2]], "run": "r", "silence_s": 5.0, "wait": False}),
        ("rebalance_experts", {"slots": [[0, 1]]}, {"slots": [[0, 1]]}),
        ("refresh_weights", {"source": {"kind": "path", "path": "/m", "odd": 1}, "checksums": {"a": "AB" * 16}},
         {"source": {"kind": "path", "path": "/m"}, "checksums": {"a": "ab" * 16}}),
        ("apply_refresh", {"source": {"kind": "shared_memory", "segment": "s", **LAYOUT}},
         {"source": {"kind": "shared_memory", "segment": "s", **LAYOUT}}),
        ("apply_refresh", {"source": {"kind": "group", "load_format": "packed", **LAYOUT}},
         {"source": {"kind": "group", "group_name": "weight_update_group", "load_format": "packed", **LAYOUT}}),
        ("apply_refresh", {"source": {"kind": "file", "file": "/x", "format": "safetensors", "delete": True}},
         {"source": {"kind": "file", "file": "/x", "format": "safetensors"}}),
    ],
)  # fmt: skip
async def test_what_the_engine_gets(
    front_end: FrontEnd, kind: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    response = await front_end.post(f"/v1/control/{kind}", body)
    assert response.status_code == (202 if body.get("wait") is False else 200), response.text
    assert front_end.client.controlled.last == (kind, expected)
    reply = response.json()
    assert (reply["kind"], reply["state"]) == (kind, "running" if body.get("wait") is False else "succeeded")


async def test_a_body_may_be_left_out(front_end: FrontEnd) -> None:
    for kind in ("pause", "resume", "sleep", "wake", "begin_refresh", "commit_refresh", "abort_refresh", "checksum"):
        assert (await front_end.http.post(f"/v1/control/{kind}")).status_code == 200


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("pause", {"mode": "soon"}, "mode"),
        ("pause", {"timeout_s": 0}, "timeout_s"),
        ("pause", {"wait": "false"}, "wait"),
        ("sleep", {"tags": []}, "tags"),
        ("sleep", {"tags": ["weights", "cpu"]}, "tags[1]"),
        ("set_version", {}, "version"),
        ("set_version", {"version": "a\nb"}, "version"),
        ("apply_refresh", {"source": {}, "checksums": {"a": "xyz"}}, "checksums.a"),
        ("compare", {"path": "a\0b"}, "path"),
        ("get_weight", {"name": "a", "max_values": 0}, "max_values"),
        ("join_group", {"host": "h", "port": 0, "rank_offset": 0, "world_size": 2}, "port"),
        ("rebalance_experts", {"action": "shuffle"}, "action"),
        ("rebalance_experts", {"slots": [[0, "x"]]}, "slots[0][1]"),
        ("refresh_weights", {}, "source"),
        ("refresh_weights", {"source": None}, "source"),
        ("refresh_weights", {"source": {}}, "source.kind"),
        ("refresh_weights", {"source": {"kind": ["path"]}}, "source.kind"),
        ("refresh_weights", {"source": {"kind": "path"}}, "source.path"),
        ("apply_refresh", {"source": {"kind": "shared_memory", "segment": "s"}}, "source.names"),
        ("apply_refresh", {"source": {"kind": "group", **LAYOUT, "dtypes": ["f32"]}}, "source.dtypes"),
        ("apply_refresh", {"source": {"kind": "group", **LAYOUT, "shapes": [[1], [2**41]]}}, "source.shapes[1][0]"),
        ("apply_refresh", {"source": {"kind": "group", **LAYOUT, "offsets": [0]}}, "source.offsets"),
        ("apply_refresh", {"source": {"kind": "file", "file": "/x", "format": "pickle"}}, "source.format"),
        ("apply_refresh", {"source": {"kind": "file", "file": "/x", "format": "pickle", "names": []}}, "source.names"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(front_end: FrontEnd, kind: str, body: dict[str, Any], param: str) -> None:
    response = await front_end.post(f"/v1/control/{kind}", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not front_end.client.controlled.calls


async def test_unknown_fields_of_a_source_are_reported_or_refused(make: Make) -> None:
    body = {"source": {"kind": "path", "path": "/m", "load_fromat": "x"}, "verison": "1"}
    response = await make().post("/v1/control/refresh_weights", body)
    assert response.headers["x-headrace-unknown-fields"] == "verison,source.load_fromat"
    strict = make(admission={"strict_fields": True})
    del body["verison"]
    response = await strict.post("/v1/control/refresh_weights", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "source.load_fromat")


def test_bodies_hold_what_the_engine_takes() -> None:
    for kind, model, _ in (*OPERATIONS, *WITH_WEIGHTS):
        taken = set(ENGINE_OPERATIONS[kind].arguments.__struct_fields__)
        assert set(model.model_fields) - {"wait"} == taken, kind
    fields = set().union(*(model.model_fields for model in SOURCES.values()))
    assert fields | {"delete"} == set(Source.__struct_fields__)


# ---------------------------------------------------------------------------------------------- tensors as bodies


async def test_a_frame_brings_arguments_and_tensors(front_end: FrontEnd, folder: Path) -> None:
    fields = {**LAYOUT, "offsets": [0, 64], "version": "3", "kv": "keep", "wait": False}
    response = await send_frame(front_end, "refresh_weights", frame(fields))
    assert response.status_code == 202, response.text
    kind, arguments = front_end.client.controlled.last
    source = arguments.pop("source")
    (file,) = files(folder)
    assert file.read_bytes() == SENT
    assert source == {
        "kind": "file", "file": str(file), "delete": True, "format": "raw", **LAYOUT, "offsets": [0, 64]
    }  # fmt: skip
    assert (kind, arguments) == ("refresh_weights", {"version": "3", "kv": "keep", "wait": False})


async def test_a_safetensors_body_has_its_arguments_in_the_query(front_end: FrontEnd, folder: Path) -> None:
    query = {
        "version": "7",
        "delta": "true",
        "timeout_s": "2.5",
        "wait": "true",
        "checksums": '{"a": "%s"}' % ("0" * 32),
    }
    headers = {"content-type": "application/x-safetensors; charset=x"}
    response = await front_end.http.post("/v1/control/refresh_weights", params=query, content=SENT, headers=headers)
    assert response.status_code == 200, response.text
    (file,) = files(folder)
    assert front_end.client.controlled.last == (
        "refresh_weights",
        {
            "source": {"kind": "file", "file": str(file), "delete": True, "format": "safetensors"},
            "version": "7", "delta": True, "timeout_s": 2.5, "checksums": {"a": "0" * 32},
        },
    )  # fmt: skip
    for name, value in (
        ("delta", "perhaps"),
        ("timeout_s", "nan"),
        ("checksums", "{"),
        ("mode", "x"),
        ("source", "{}"),
    ):
        response = await front_end.http.post(
            "/v1/control/refresh_weights", params={name: value}, content=SENT, headers=headers
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
    assert files(folder) == [file]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_frame"),
        (b"\x05", 400, "invalid_frame"),
        ((5).to_bytes(8, "little") + b"{}", 400, "invalid_frame"),
        (b"\xff" * 8 + b"{}", 413, "request_too_large"),
        ((0).to_bytes(8, "little"), 400, "invalid_json"),
        (frame({}), 400, "missing_field"),
        (frame({**LAYOUT, "names": ["a"]}), 400, "invalid_value"),
        (frame({**LAYOUT, "format": "gguf"}), 400, "invalid_value"),
        (frame({"format": "pickle"}), 400, "pickles_refused"),
        (frame({**LAYOUT, "source": {"kind": "path"}}), 400, "invalid_value"),
        (frame({**LAYOUT, "version": 5}), 400, "invalid_value"),
    ],
    ids=range(11),
)
async def test_frames_that_are_wrong(front_end: FrontEnd, folder: Path, content: bytes, status: int, code: str) -> None:
    response = await send_frame(front_end, "refresh_weights", content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    assert not files(folder)
    assert not front_end.client.controlled.calls


async def test_a_refused_operation_leaves_no_file(front_end: FrontEnd, folder: Path) -> None:
    front_end.client.controlled.errors["apply_refresh"] = Conflict("pause op-1 is running")
    response = await send_frame(front_end, "apply_refresh", frame(LAYOUT))
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    assert not files(folder)


async def test_pickles_where_they_are_allowed(folder: Path) -> None:
    config = ServeConfig(engine=EngineConfig(control=ControlConfig(allow_pickled_weights=True)))
    client = FakeClient()
    app = create_app(client, byte_tokenizer(), config, served_names=("fake",))
    async with http_client(app) as http:
        response = await http.post(
            "/v1/control/apply_refresh",
            content=frame({"format": "pickle", "load_format": "flattened_bucket"}),
            headers={"content-type": "application/octet-stream"},
        )
    assert response.status_code == 200
    source = client.controlled.last[1]["source"]
    assert (source["format"], source["load_format"]) == ("pickle", "flattened_bucket")
    app.state.context.inputs.close()


# ------------------------------------------------------------------------------------------------------ questions


async def test_questions_and_aborts_are_answered_while_an_operation_runs(front_end: FrontEnd) -> None:
    front_end.client.controlled.gate.clear()
    pause = asyncio.create_task(front_end.post("/v1/control/pause", {"mode": "wait"}))
    await asyncio.sleep(0.01)
    status = await front_end.http.get("/v1/control/status")
    assert (status.status_code, status.json()["state"]) == (200, "ready")
    assert (await front_end.http.get("/v1/control/operations")).status_code == 200
    assert (await front_end.post("/v1/control/abort", {"all": True})).json()["aborted"] == 3
    assert not pause.done()
    front_end.client.controlled.gate.set()
    assert (await pause).status_code == 200


async def test_operations_are_listed_found_and_cancelled(front_end: FrontEnd) -> None:
    running = (await front_end.post("/v1/control/pause", {"wait": False})).json()
    await front_end.post("/v1/control/resume")
    listed = (await front_end.http.get("/v1/control/operations")).json()["operations"]
    assert [operation["kind"] for operation in listed] == ["resume", "pause"]
    found = await front_end.http.get(f"/v1/control/operations/{running['id']}")
    assert found.json() == running
    response = await front_end.http.get("/v1/control/operations/op-9")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await front_end.http.post(f"/v1/control/operations/{running['id']}/cancel")
    assert (response.status_code, response.json()["state"]) == (200, "cancelled")
    assert front_end.client.controlled.last == ("cancel", {"id": running["id"]})
    for name in ("x" * 200, "%00", "%C3%A9"):
        assert (await front_end.http.get(f"/v1/control/operations/{name}")).status_code == 400


async def test_experts(front_end: FrontEnd) -> None:
    for query, clear in (("", False), ("?clear=true", True), ("?clear=false", False)):
        response = await front_end.http.get(f"/v1/experts{query}")
        assert (response.status_code, response.json()) == (200, EXPERTS)
        assert front_end.client.controlled.last == ("experts", {"clear": clear})
    response = await front_end.http.get("/v1/experts?clear=perhaps")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "clear")
    front_end.client.controlled.errors["experts"] = Conflict("The model has no experts.", code="no_experts")
    response = await front_end.http.get("/v1/experts")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "no_experts")


async def test_errors_of_the_engine_are_the_replies(front_end: FrontEnd) -> None:
    errors = front_end.client.controlled.errors
    errors["reset_prefix_cache"] = Conflict("refresh_weights op-1 is running")
    response = await front_end.post("/v1/control/reset_prefix_cache")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    errors["get_weight"] = InvalidRequest("there is no tensor 'a'", param="name")
    response = await front_end.post("/v1/control/get_weight", {"name": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "name")


async def test_every_route_is_for_admins(make: Make) -> None:
    front_end = make(host="192.0.2.7")
    schema = front_end.app.openapi()["paths"]
    paths = {path: item for path, item in schema.items() if path.startswith(("/v1/control/", "/v1/experts"))}
    assert len(paths) == len(OPERATIONS) + len(WITH_WEIGHTS) + 7
    for path, item in paths.items():
        for method in item:
            response = await front_end.http.request(method, path.replace("{operation_id}", "op-1"))
            assert response.status_code == 403


# ----------------------------------------------------------------------------------------------------------- fuzz

VALUES: list[str] = [  # as JSON text
    "null", "true", "0", "-1", "1", "0.5", "1e300", "1e999", "NaN", "9223372036854775808", "1" + "0" * 400, '""',
    '"x"', '"\\u0000"', '"\\ud800"', '"' + "y" * 5000 + '"', "[]", "[[]]", "[null]", "[-1]", '["x"]', '["x", 5]',
    "[[1]]", "[[1e99]]", "[" + "0," * 5000 + "0]", "{}", '{"a": 1}', '{"a": "x"}', '{"kind": "path"}',
    '{"kind": {}}',
]  # fmt: skip
REQUIRED = {"source": '{"kind": "path", "path": "/m"}', "version": '"1"', "path": '"/m"', "name": '"a"', "host": '"h"',
            "port": "1", "rank_offset": "0", "world_size": "2"}  # fmt: skip
SOURCE_BASES = {
    "path": {"path": '"/m"'},
    "file": {"file": '"/m"', "format": '"safetensors"'},
    "shared_memory": {"segment": '"s"', **{name: json.dumps(value) for name, value in LAYOUT.items()}},
    "group": {name: json.dumps(value) for name, value in LAYOUT.items()},
}


def as_json(fields: dict[str, str]) -> bytes:
    return ("{" + ",".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


def check_fuzzed(response: httpx.Response, told: Any) -> None:
    assert response.status_code in (200, 202, 400), (told, response.text[:300])
    if response.status_code == 400:
        assert response.json()["error"]["message"], told


@pytest.mark.parametrize("operation", [*OPERATIONS, *WITH_WEIGHTS], ids=lambda operation: operation[0])
async def test_no_field_of_any_body_makes_a_5xx(front_end: FrontEnd, operation: Any) -> None:
    kind, model, _ = operation
    base = {name: REQUIRED[name] for name, field in model.model_fields.items() if field.is_required()}
    for name, value in product(model.model_fields, VALUES):
        response = await front_end.http.post(f"/v1/control/{kind}", content=as_json({**base, name: value}))
        check_fuzzed(response, (kind, name, value[:60]))


@pytest.mark.parametrize("kind", SOURCE_BASES)
async def test_no_field_of_any_source_makes_a_5xx(front_end: FrontEnd, kind: str) -> None:
    names = {"path", "file", "segment", "group_name", "format", "load_format", *LAYOUT, "offsets", "kind"}
    for name, value in product(sorted(names), VALUES):
        source = {"kind": f'"{kind}"', **SOURCE_BASES[kind], name: value}
        content = as_json({"source": as_json(source).decode()})
        response = await front_end.http.post("/v1/control/apply_refresh", content=content)
        check_fuzzed(response, (kind, name, value[:60]))


async def test_no_field_of_a_frame_makes_a_5xx_or_leaves_a_file(front_end: FrontEnd, folder: Path) -> None:
    front_end.client.controlled.errors["refresh_weights"] = InvalidRequest("seen")
    base = {name: json.dumps(value) for name, value in LAYOUT.items()}
    names = (*LAYOUT, "offsets", "format", "load_format", "version", "checksums", "timeout_s", "source", "kind")
    for name, value in product(names, VALUES):
        header = as_json({**base, name: value})
        content = len(header).to_bytes(8, "little") + header + SENT
        response = await send_frame(front_end, "refresh_weights", content)
        check_fuzzed(response, (name, value[:60]))
    assert not files(folder)
    for name, value in product(("version", "checksums", "delta", "timeout_s", "wait", "mode", "odd"), VALUES):
        response = await front_end.http.post(
            "/v1/control/refresh_weights",
            params={name: value},
            content=SENT,
            headers={"content-type": "application/x-safetensors"},
        )
        check_fuzzed(response, (name, value[:60]))
    assert not files(folder)
