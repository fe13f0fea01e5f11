"""SGLang's routes that change or show weights. slime, verl's HTTP adapter, AReaL and miles speak them.

There an update is many calls without a beginning or an end, here it is a transaction. The first call of
`/update_weights_from_tensor` or `..._distributed` opens a refresh, and these commit it:

    a call with flush_cache true      once no tensor is missing: verl's adapters flush with the last call; others say
                                      true (or, unless paused, nothing) with each call, and all but the last stage
    /flush_cache, /update_weight_version, /continue_generation,
    /resume_memory_occupation of the KV cache
                                      for trainers that never flush (slime) or leave the flag out while paused (AReaL)

A commit with missing tensors fails, ends the refresh and says so. `weight_version` may come with any call that commits;
of a refresh that another route commits the version is the engine's next epoch, or that of `/update_weight_version`,
which SGLang and vLLM share: the reply here has the fields of both. There `abort_all_requests` is true by default and
renaming weights kills every request; here requests are aborted only where a body says true.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.server.body import read_body
from headrace.server.context import ServerContext, context_of
from headrace.server.dialects.bodies import (
    DEFAULT_GROUP,
    GroupFields,
    GroupName,
    Nothing,
    as_int,
    as_text,
    group_source,
    pickled_source,
    read_tensor_body,
)
from headrace.server.dialects.checker import CheckRequest, check_weights
from headrace.server.dialects.errors import answering, refuse, success_reply
from headrace.server.dialects.refresh import (
    Result,
    add_tensors,
    commit,
    commit_if_open,
    engine_status,
    join_group,
    load_path,
    operate,
    weights_version,
)
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.operate import end_requests
from headrace.server.protocol.common import RequestModel

router = APIRouter(route_class=answering(success_reply), dependencies=[Depends(require_admin)], include_in_schema=False)
refuse(
    router,
    ("/update_weights_from_ipc",),
    "handles of CUDA memory cannot be opened here; use /update_weights_from_disk or a process group.",
)
refuse(router, ("/pull_weights",), "put the files in place and call /update_weights_from_disk.")
DEFAULT_VALUES = 100


class UpdateFlags(RequestModel):
    """What every update may say."""

    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | int | None = None

    @property
    def mode(self) -> str | None:
        return "abort" if self.abort_all_requests else None

    @property
    def version(self) -> str | None:
        return as_text(self.weight_version)


class DiskUpdate(UpdateFlags):
    model_path: str


class TensorUpdate(UpdateFlags):
    serialized_named_tensors: list[str] | str
    load_format: str | None = None


class DistributedUpdate(UpdateFlags):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = None
    load_format: str | None = None

    def source(self) -> dict[str, Any]:
        return group_source(self.names, self.dtypes, self.shapes, group_name=self.group_name, form=self.load_format)


class NewVersion(RequestModel):
    new_version: str | int
    abort_all_requests: bool | None = None


class WeightByName(RequestModel):
    name: str
    truncate_size: int | str = DEFAULT_VALUES


def succeeded(message: str, **fields: Any) -> Response:
    return json_response({"success": True, "message": message, **fields})


@router.post("/update_weights_from_disk")
async def update_from_disk(request: Request) -> Response:
    """`flush_cache: false` lets running requests keep their KV."""
    context = context_of(request)
    body = await read_body(request, DiskUpdate)
    kv = "keep" if body.flush_cache is False else None
    result = await load_path(context, body.model_path, version=body.version, mode=body.mode, kv=kv)
    status = await engine_status(context)
    num_paused = status["num_running"] + status["num_waiting"] if status["is_paused"] else 0
    return succeeded(_committed(result), num_paused_requests=num_paused)


@router.post("/update_weights_from_tensor")
async def update_from_tensor(request: Request) -> Response:
    context = context_of(request)
    body = await read_tensor_body(request, TensorUpdate)
    async with pickled_source(context, body.serialized_named_tensors, body.load_format) as source:
        return await _update(context, body, source)


@router.post("/update_weights_from_distributed")
async def update_from_distributed(request: Request) -> Response:
    body = await read_body(request, DistributedUpdate)
    return await _update(context_of(request), body, body.source())


async def _update(context: ServerContext, body: UpdateFlags, source: dict[str, Any]) -> Response:
    added = await add_tensors(context, source, mode=body.mode)
    num_missing = added["num_missing"]
    flushes = body.flush_cache
    if flushes is None:
        flushes = not (await engine_status(context))["is_paused"]
    if flushes and not num_missing:
        return succeeded(_committed(await commit(context, version=body.version, mode=body.mode)))
    return succeeded(f"{added['num_tensors']} tensors are staged, {num_missing} are missing; nothing serves them yet.")


def _committed(result: Result) -> str:
    return f"{result['num_tensors']} tensors serve as version {result['version']}."


@router.post("/init_weights_update_group")
async def init_group(request: Request) -> Response:
    """Returns when the trainer has joined."""
    body = await read_body(request, GroupFields)
    await join_group(context_of(request), body.arguments())
    return succeeded("The group is formed.")


@router.post("/destroy_weights_update_group")
async def destroy_group(request: Request) -> Response:
    body = await read_body(request, GroupName, allow_empty=True)
    await operate(context_of(request), "leave_group", group_name=body.group_name or DEFAULT_GROUP)
    return succeeded("The group is left.")


@router.post("/update_weight_version")
async def update_version(request: Request) -> Response:
    """Also vLLM's. Commits an open refresh under the new name."""
    context = context_of(request)
    body = await read_body(request, NewVersion)
    version = str(body.new_version)
    if body.abort_all_requests:
        await end_requests(context, None)
    if await commit_if_open(context, version=version) is None:
        await operate(context, "set_version", version=version)
    return succeeded(f"The weights are version {version}.", new_version=version)


@router.get("/get_weight_version")
async def get_version(request: Request) -> Response:
    return json_response({"weight_version": await weights_version(context_of(request))})


@router.api_route("/weights_checker", methods=["GET", "POST"])
async def weights_checker(request: Request) -> Response:
    body = await read_body(request, CheckRequest, allow_empty=True)
    found = await check_weights(context_of(request), body)
    if not found.get("match", True):
        raise InvalidRequest(f"{len(found['mismatches'])} tensors differ, the first: {found['mismatches'][:3]}.")
    return succeeded(f"{body.action} done.", **found)


@router.post("/post_process_weights")
async def post_process(request: Request) -> Response:
    """slime's, for quantised weights: a commit does all of it."""
    await read_body(request, Nothing, allow_empty=True)
    return succeeded("Weights are packed when they are committed; there is nothing to do.")


@router.post("/get_weights_by_name")
async def get_weight(request: Request) -> Response:
    return await _weight(context_of(request), await read_body(request, WeightByName))


@router.get("/get_weights_by_name")
async def get_weight_by_query(request: Request) -> Response:
    """Some clients send a body with GET, others a query."""
    if await request.body():
        return await get_weight(request)
    name = request.query_params.get("name")
    if name is None:
        raise InvalidRequest("name is missing.", param="name", code="missing_field")
    size = request.query_params.get("truncate_size", DEFAULT_VALUES)
    return await _weight(context_of(request), WeightByName(name=name, truncate_size=size))


async def _weight(context: ServerContext, body: WeightByName) -> Response:
    """The first values, flat, where SGLang has the first rows."""
    size = as_int(body.truncate_size, "truncate_size")
    if size < 1:
        raise refusal("truncate_size", size, "at least 1")
    result = await operate(context, "get_weight", name=body.name, max_values=size)
    return json_response(result["values"])
