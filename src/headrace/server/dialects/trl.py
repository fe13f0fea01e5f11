"""The weight routes of TRL's own server (`trl vllm-serve`), with and without the slash at the end.

Its client posts first and then joins, or broadcasts, in the same thread. So these routes answer before the effect: the
operation runs on in the engine, the next call waits for it and tells what went wrong. `/reset_prefix_cache/`, which
ends an update, and `/get_world_size/` are in `vllm.py`. The client is the last rank of its group.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.dialects.bodies import DEFAULT_GROUP, NUM_RANKS, Nothing, as_int, group_source
from headrace.server.dialects.refresh import add_tensors, ends_refresh, join_group, operate, wait_for_background
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.protocol.common import RequestModel
from headrace.server.routes.health import readyz

router = APIRouter(dependencies=[Depends(require_admin)], include_in_schema=False)
probes = APIRouter(include_in_schema=False)
probes.add_api_route("/health/", readyz, methods=["GET"])


class InitCommunicator(RequestModel):
    host: str
    port: int | str
    world_size: int = NUM_RANKS + 1
    client_device_uuid: str | None = None


class NamedParam(RequestModel):
    name: str
    dtype: str
    shape: list[int]


@router.post("/init_communicator")
@router.post("/init_communicator/")
async def init_communicator(request: Request) -> Response:
    body = await read_body(request, InitCommunicator)
    arguments = {
        "host": body.host,
        "port": as_int(body.port, "port"),
        "rank_offset": 0,
        "world_size": body.world_size,
        "group_name": DEFAULT_GROUP,
    }
    await join_group(context_of(request), arguments, wait=False)
    return json_response({"message": "Request received, initializing communicator"})


@router.post("/update_named_param")
@router.post("/update_named_param/")
async def update_named_param(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, NamedParam)
    async with ends_refresh(context):
        await wait_for_background(context)
    source = group_source([body.name], [body.dtype], [body.shape]) | {"src": -1}  # the trainer is the last member
    await add_tensors(context, source, wait=False)
    return json_response({"message": "Request received, updating named parameter"})


@router.post("/close_communicator")
@router.post("/close_communicator/")
async def close_communicator(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    await operate(context_of(request), "leave_group", group_name=DEFAULT_GROUP)
    return json_response({"message": "Request received, closing communicator"})
