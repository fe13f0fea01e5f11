"""FastDeploy's control routes, of both generations.

    /v1/...   {"request_id", "status": "success" or "error", "error_message", "result"}; the HTTP status of an error is
              the engine's, where FastDeploy says 500 to everything
    /clear_load_weight, /update_model_weight (GET and POST)
              {"dp_rank", "local_dp_rank", "msg"} and a status that depends on what is going on:

                  weights are      clear            update
                  there            they go: 200     200, nothing to do
                  gone             200, nothing     they come: 200
                  on their way out 400              403
                  on their way in  403              400
                  not done in 300 s                 404; it goes on, and the next call tells

`/v1/update_weights` needs a paused engine and a folder or file (`path`, `model_path`, else the server's own model);
`verify_checksum` compares the result with it. `/v1/sleep` pauses, `/v1/wakeup` resumes once nothing sleeps.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import Conflict, ErrorInfo, InternalError, InvalidRequest
from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.dialects.bodies import Nothing, as_text, query_tags, split_tags
from headrace.server.dialects.errors import answering
from headrace.server.dialects.refresh import engine_status, load_path, operate
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.operate import end_requests
from headrace.server.protocol.common import RequestModel

LEGACY_TIMEOUT_S = 300.0
GOING, COMING, GONE, THERE = "clearing", "updating", "cleared", "normal"


def _reply(result: Any, *, error: ErrorInfo | None = None, **fields: Any) -> Response:
    content = {
        "request_id": f"control-{uuid.uuid4()}",
        "status": "success" if error is None else "error",
        "error_message": None if error is None else error.message,
        "result": result,
        **fields,
    }
    return json_response(content, 200 if error is None else error.status)


def _error_reply(info: ErrorInfo) -> Response:
    return _reply(None, error=info)


def _legacy_reply(status: int, message: str) -> Response:
    return json_response({"dp_rank": 0, "local_dp_rank": 0, "msg": message}, status)


def _legacy_error_reply(info: ErrorInfo) -> Response:
    return _legacy_reply(info.status, info.message)


router = APIRouter(route_class=answering(_error_reply), dependencies=[Depends(require_admin)], include_in_schema=False)
legacy = APIRouter(
    route_class=answering(_legacy_error_reply), dependencies=[Depends(require_admin)], include_in_schema=False
)


class TagsRequest(RequestModel):
    tags: str | list[str] | None = None


class UpdateWeightsRequest(RequestModel):
    version: str | int | None = None
    verify_checksum: bool = False
    path: str | None = None
    model_path: str | None = None
    rsync_config: Any = None


class AbortRequest(RequestModel):
    abort_all: bool | None = None
    req_ids: list[str] | None = None


@router.post("/v1/pause")
async def pause(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    return _reply(await operate(context_of(request), "pause", mode="abort"))


@router.post("/v1/resume")
async def resume(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    return _reply(await operate(context_of(request), "resume"))


@router.get("/v1/is_paused")
async def is_paused(request: Request) -> Response:
    paused = {"is_paused": (await engine_status(context_of(request)))["is_paused"]}
    return _reply(paused, **paused)


@router.post("/v1/sleep")
async def sleep(request: Request) -> Response:
    context = context_of(request)
    tags = await _tags(request)
    await operate(context, "pause", mode="abort")
    return _reply(await operate(context, "sleep", tags=tags))


@router.post("/v1/wakeup")
async def wakeup(request: Request) -> Response:
    context = context_of(request)
    result = await operate(context, "wake", tags=await _tags(request))
    if not (await engine_status(context))["asleep"]:
        await operate(context, "resume")
    return _reply(result)


async def _tags(request: Request) -> list[str] | None:
    """In the query, or in the body as a list or with commas."""
    given = (await read_body(request, TagsRequest, allow_empty=True)).tags
    return query_tags(request) or split_tags([given] if isinstance(given, str) else given or [])


@router.post("/v1/update_weights")
async def update_weights(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, UpdateWeightsRequest, allow_empty=True)
    path = body.path or body.model_path
    if body.rsync_config is not None and path is None:
        raise InvalidRequest("rsync_config is not available here: give a path.", param="rsync_config")
    if not (await engine_status(context))["is_paused"]:
        raise Conflict("Weights are updated while the engine is paused: call /v1/pause first.", code="not_paused")
    path = path or context.config.engine.model.model
    result = await load_path(context, path, version=as_text(body.version))
    if body.verify_checksum:
        compared = await operate(context, "compare", path=path)
        if not compared["match"]:
            raise InternalError(f"The new weights are not those of {path}: {compared['mismatches'][:3]} differ.")
    return _reply([result])


@router.post("/v1/abort_requests")
async def abort_requests(request: Request) -> Response:
    body = await read_body(request, AbortRequest, allow_empty=True)
    if not body.abort_all and not body.req_ids:
        raise InvalidRequest("abort_all: true, or req_ids, must be given.", param="req_ids")
    names = None if body.abort_all else body.req_ids
    return _reply({"aborted": await end_requests(context_of(request), names)})


@legacy.api_route("/clear_load_weight", methods=["GET", "POST"])
async def clear_weights(request: Request) -> Response:
    return await _change(request, "sleep", start=THERE, under_way=GOING, opposite=COMING)


@legacy.api_route("/update_model_weight", methods=["GET", "POST"])
async def bring_weights(request: Request) -> Response:
    return await _change(request, "wake", start=GONE, under_way=COMING, opposite=GOING)


async def _change(request: Request, operation: str, *, start: str, under_way: str, opposite: str) -> Response:
    context = context_of(request)
    weights = _weights(await engine_status(context))
    if weights == under_way:
        return _legacy_reply(400, f"The weights are {weights} already; wait for it.")
    if weights == opposite:
        return _legacy_reply(403, f"The weights are {weights}; wait for its end.")
    if weights != start:
        return _legacy_reply(200, f"The weights are {weights} already.")
    try:
        async with asyncio.timeout(LEGACY_TIMEOUT_S):
            await operate(context, operation)
    except TimeoutError:
        return _legacy_reply(404, f"{operation} of the weights takes more than {LEGACY_TIMEOUT_S:g} s; it goes on.")
    return _legacy_reply(200, f"The weights are {GONE if start == THERE else THERE}.")


def _weights(status: dict[str, Any]) -> str:
    """FastDeploy's word for the state."""
    running = (status["operation"] or {}).get("kind")
    if running == "sleep":
        return GOING
    if running == "wake" or status["state"] == "updating":
        return COMING
    return GONE if "weights" in status["asleep"] else THERE
