"""vLLM's POST /collective_rpc, for the worker methods that trainers call: OpenRLHF's, AReaL's, vLLM's own.

There any method of the worker can be called by name; here each is a function of this file, and everything else is
refused. Arguments may come by position or by name. The reply has one result per rank, and these methods return none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.server.body import parse_model, read_body
from headrace.server.context import ServerContext, context_of
from headrace.server.dialects.bodies import NUM_RANKS, GroupFields, GroupName, Nothing, group_source
from headrace.server.dialects.refresh import add_tensors, commit_if_open, join_group, load_path, operate
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.protocol.common import RequestModel

router = APIRouter(dependencies=[Depends(require_admin)], include_in_schema=False)
OPENRLHF_GROUP = "openrlhf"  # its calls for tensors do not name it
CUDA_MEMORY = ("update_weights_from_ipc", "update_weight_cuda_ipc")


class RpcRequest(RequestModel):
    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


class OneTensor(RequestModel):
    name: str
    dtype: str
    shape: list[int]
    group_name: str | None = None


class Folder(RequestModel):
    model_path: str


class Tags(RequestModel):
    tags: list[str] | None = None


async def _init_group(context: ServerContext, fields: GroupFields) -> None:
    await join_group(context, fields.arguments(OPENRLHF_GROUP))


async def _leave_group(context: ServerContext, fields: GroupName) -> None:
    await operate(context, "leave_group", group_name=fields.group_name or OPENRLHF_GROUP)


async def _update_weight(context: ServerContext, fields: OneTensor) -> None:
    group_name = fields.group_name or OPENRLHF_GROUP
    await add_tensors(context, group_source([fields.name], [fields.dtype], [fields.shape], group_name=group_name))


async def _load_folder(context: ServerContext, fields: Folder) -> None:
    await load_path(context, fields.model_path)


async def _reset_prefix_cache(context: ServerContext, _: Nothing) -> None:
    if await commit_if_open(context) is None:
        await operate(context, "reset_prefix_cache")


async def _sleep(context: ServerContext, _: Nothing) -> None:
    await operate(context, "sleep")


async def _wake_up(context: ServerContext, fields: Tags) -> None:
    await operate(context, "wake", tags=fields.tags)


Method = tuple[tuple[str, ...], type[Any], Callable[[ServerContext, Any], Awaitable[None]]]
GROUP = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
METHODS: dict[str, Method] = {
    "init_process_group": (GROUP, GroupFields, _init_group),
    "destroy_process_group": (("group_name",), GroupName, _leave_group),
    "update_weight": (("name", "dtype", "shape", "empty_cache"), OneTensor, _update_weight),
    "update_weights": (("model_path",), Folder, _load_folder),
    "reload_weights": (("model_path",), Folder, _load_folder),
    "reset_prefix_cache": ((), Nothing, _reset_prefix_cache),
    "sleep": (("level",), Nothing, _sleep),
    "wake_up": (("tags",), Tags, _wake_up),
}
OTHER_NAMES = {"weights_path": "model_path"}  # vLLM's reload_weights


@router.post("/collective_rpc")
async def collective_rpc(request: Request) -> Response:
    body = await read_body(request, RpcRequest)
    if body.method in CUDA_MEMORY:
        raise InvalidRequest(
            f"{body.method} is not available: handles of CUDA memory cannot be opened here; use a folder or a process "
            "group.",
            param="method",
            code="not_available",
        )
    if body.method not in METHODS:
        raise refusal("method", body.method, f"one of {', '.join(sorted(METHODS))}")
    names, model, call = METHODS[body.method]
    named = {OTHER_NAMES.get(name, name): value for name, value in (body.kwargs or {}).items()}
    fields = dict(zip(names, body.args or (), strict=False)) | named
    await call(context_of(request), parse_model(request, model, fields))
    return json_response({"results": [None] * NUM_RANKS})
