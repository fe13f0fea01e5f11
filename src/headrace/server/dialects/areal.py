"""The routes that AReaL adds to a vLLM server. Replies are SGLang's: `{"success", "message"}`.

AReaL says what comes in one call and asks for it to be received in the next. Front ends remember nothing, so the first
starts to receive in the engine, and the second waits until that is done. Buckets repeat this;
`/areal_continue_generation` commits them.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.dialects.bodies import GroupFields, Nothing
from headrace.server.dialects.errors import answering, refuse, success_reply
from headrace.server.dialects.refresh import (
    add_tensors,
    commit_if_open,
    ends_refresh,
    join_group,
    load_path,
    operate,
    wait_for_background,
)
from headrace.server.dialects.sglang_weights import DiskUpdate, DistributedUpdate, succeeded
from headrace.server.keys import require_admin

router = APIRouter(route_class=answering(success_reply), dependencies=[Depends(require_admin)], include_in_schema=False)
refuse(
    router,
    ("/areal_update_weights_lora", "/areal_set_update_weight_meta_lora", "/areal_update_weights_lora_xccl"),
    "this version has no adapters; merge them into the weights.",
)


@router.post("/areal_update_weights")
async def update_weights(request: Request) -> Response:
    body = await read_body(request, DiskUpdate)
    result = await load_path(context_of(request), body.model_path, version=body.version, mode=body.mode)
    return succeeded(f"The weights are version {result['version']}.")


@router.post("/areal_init_weights_update_group")
async def init_group(request: Request) -> Response:
    body = await read_body(request, GroupFields)
    await join_group(context_of(request), body.arguments())
    return succeeded("The group is formed.")


@router.post("/areal_set_update_weight_meta")
async def set_meta(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, DistributedUpdate)
    await add_tensors(context, body.source(), mode=body.mode, wait=False)
    return succeeded(f"{len(body.names)} tensors are awaited.")


@router.post("/areal_update_weights_xccl")
async def receive(request: Request) -> Response:
    context = context_of(request)
    await read_body(request, Nothing, allow_empty=True)
    async with ends_refresh(context):
        await wait_for_background(context)
    return succeeded("The tensors have arrived; they serve after /areal_continue_generation.")


@router.post("/areal_pause_generation")
async def pause(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    await operate(context_of(request), "pause", mode="abort", clear_cache=True)
    return succeeded("Generation is paused and all requests are aborted.")


@router.post("/areal_continue_generation")
async def resume(request: Request) -> Response:
    context = context_of(request)
    await read_body(request, Nothing, allow_empty=True)
    await commit_if_open(context)
    await operate(context, "resume")
    return succeeded("Generation continues.")
