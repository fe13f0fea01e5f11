"""vLLM's development routes, which TRL's asynchronous trainer, SkyRL, prime-rl and LMDeploy's users (XTuner) call.

Errors have the server's own body. Paths that more than one dialect uses:

    /update_weights         vLLM's body has `update_info`, LMDeploy's `serialized_named_tensors`; the latter needs no
                            call before or after: `finished: true` commits
    /sleep                  vLLM's query has `level` and `mode`, LMDeploy's `tags` too; level 0 is a pause
    /wake_up, /wakeup       the same in both. Without tags it also resumes; `scheduling` alone only resumes
    /reset_prefix_cache     TRL's own server has it with a slash at the end. Both commit an open refresh first, for
                            trainers (TRL's, OpenRLHF's) to which it is the end of an update
    /get_world_size         the same in both
    /update_weight_version  in `sglang_weights.py`, where the reply satisfies both

Trainers call /finish_weight_update without looking at what came before: an update that failed is over by then, and
finishing it is an error too. `collective_rpc.py` has that route.
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
    NUM_RANKS,
    GroupFields,
    Nothing,
    as_int,
    as_text,
    drop_none,
    group_source,
    pickled_source,
    query_flag,
    query_tags,
    read_tensor_body,
)
from headrace.server.dialects.checker import CheckRequest, check_weights
from headrace.server.dialects.errors import refuse
from headrace.server.dialects.refresh import (
    add_tensors,
    commit,
    commit_if_open,
    ends_refresh,
    engine_status,
    join_group,
    operate,
    wait_for_background,
    weights_version,
)
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.operate import end_requests
from headrace.server.protocol.common import RequestModel

router = APIRouter(dependencies=[Depends(require_admin)], include_in_schema=False)
refuse(
    router,
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "this version has no adapters; merge them into the weights.",
)
refuse(router, ("/start_draft_weight_update",), "this version has no draft model.")
refuse(router, ("/scale_elastic_ep",), "the engine is one process.")
PACKED = "packed"
SCHEDULING = "scheduling"


class InitEngine(RequestModel):
    init_info: GroupFields


class UpdateInfo(RequestModel):
    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    packed: bool = False
    packed_buffer_size_bytes: int | None = None
    ipc_handles: Any = None
    ipc_handles_pickled: Any = None

    def source(self) -> dict[str, Any]:
        if self.ipc_handles is not None or self.ipc_handles_pickled is not None:
            raise InvalidRequest(
                "Handles of CUDA memory cannot be opened here; use the nccl back end of the weight transfer.",
                param="update_info.ipc_handles_pickled",
                code="not_available",
            )
        if self.names is None or self.dtype_names is None or self.shapes is None:
            raise InvalidRequest(
                "update_info needs names, dtype_names and shapes.", param="update_info", code="missing_field"
            )
        source = group_source(self.names, self.dtype_names, self.shapes, form=PACKED if self.packed else None)
        return source | drop_none(packed_buffer_bytes=self.packed_buffer_size_bytes)


class UpdateWeights(RequestModel):
    """vLLM's body or LMDeploy's."""

    update_info: UpdateInfo | None = None
    serialized_named_tensors: str | list[str] | None = None
    load_format: str | None = None
    finished: bool = False


class FinishUpdate(RequestModel):
    weight_version: str | int | None = None


class AbortRequests(RequestModel):
    request_ids: list[str] | None = None


@router.post("/pause")
async def pause(request: Request) -> Response:
    mode = request.query_params.get("mode", "abort")
    if query_flag(request, "wait_for_inflight_requests", False):  # before there were modes
        mode = "wait"
    clear_cache = query_flag(request, "clear_cache", True)
    await operate(context_of(request), "pause", mode=mode, clear_cache=clear_cache)
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    await operate(context_of(request), "resume")
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": (await engine_status(context_of(request)))["is_paused"]})


@router.post("/abort_requests")
async def abort_requests(request: Request) -> Response:
    """An empty body means all of them."""
    body = await read_body(request, AbortRequests, allow_empty=True)
    num_aborted = await end_requests(context_of(request), body.request_ids)
    return json_response({"status": "aborted", "aborted": num_aborted})


@router.post("/inference/v1/abort_requests")
async def abort_named_requests(request: Request) -> Response:
    if (await read_body(request, AbortRequests, allow_empty=True)).request_ids is None:
        raise InvalidRequest("request_ids is missing.", param="request_ids", code="missing_field")
    return await abort_requests(request)


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer(request: Request) -> Response:
    """Returns when the trainer has joined."""
    body = await read_body(request, InitEngine)
    await join_group(context_of(request), body.init_info.arguments())
    return json_response({"message": "Weight transfer initialized"})


@router.post("/start_weight_update")
async def start_update(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    await operate(context_of(request), "begin_refresh")
    return json_response({"message": "Weight update started"})


@router.post("/update_weights")
async def update_weights(request: Request) -> Response:
    context = context_of(request)
    body = await read_tensor_body(request, UpdateWeights)
    if body.serialized_named_tensors is not None:
        return await _update_from_pickle(context, body, body.serialized_named_tensors)
    if body.update_info is None:
        raise InvalidRequest("update_info or serialized_named_tensors must be given.", param="update_info")
    await add_tensors(context, body.update_info.source())
    return json_response({"message": "Weights updated"})


async def _update_from_pickle(context: ServerContext, body: UpdateWeights, serialized: str | list[str]) -> Response:
    async with pickled_source(context, serialized, body.load_format) as source:
        await add_tensors(context, source)
    if body.finished:
        await commit(context)
    return json_response(None)


@router.post("/finish_weight_update")
async def finish_update(request: Request) -> Response:
    body = await read_body(request, FinishUpdate, allow_empty=True)
    await commit(context_of(request), version=as_text(body.weight_version))
    return json_response({"message": "Weight update finished"})


@router.get("/weight_info")
async def weight_info(request: Request) -> Response:
    return json_response({"weight_version": await weights_version(context_of(request))})


@router.post("/weight_checker")
async def weight_checker(request: Request) -> Response:
    body = await read_body(request, CheckRequest, allow_empty=True)
    return json_response(await check_weights(context_of(request), body))


@router.get("/get_world_size")
@router.get("/get_world_size/")
async def get_world_size() -> Response:
    return json_response({"world_size": NUM_RANKS})


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    context = context_of(request)
    mode = request.query_params.get("mode", "abort")
    level = as_int(request.query_params.get("level", "1"), "level")
    if level not in (0, 1, 2):
        raise refusal("level", level, "0, 1 or 2")
    if level == 0:
        await operate(context, "pause", mode=mode)
    else:
        await operate(context, "sleep", tags=query_tags(request), mode=mode)
    return Response()


@router.post("/wake_up")
@router.post("/wakeup")
async def wake_up(request: Request) -> Response:
    context = context_of(request)
    tags = query_tags(request)
    if tags != [SCHEDULING]:
        await operate(context, "wake", tags=tags and [tag for tag in tags if tag != SCHEDULING])
    if tags is None or SCHEDULING in tags:
        await operate(context, "resume")
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": bool((await engine_status(context_of(request)))["asleep"])})


@router.post("/reset_prefix_cache")
@router.post("/reset_prefix_cache/")
async def reset_prefix_cache(request: Request) -> Response:
    context = context_of(request)
    async with ends_refresh(context):
        await wait_for_background(context)
    if await commit_if_open(context) is None:
        await operate(context, "reset_prefix_cache")
    return json_response({"message": "The prefix cache is reset."})


@router.post("/reset_mm_cache")
@router.post("/reset_encoder_cache")
async def reset_other_cache() -> Response:
    """There are none."""
    return Response()
