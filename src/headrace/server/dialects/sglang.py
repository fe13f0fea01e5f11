"""SGLang's routes for memory, pausing, aborts and information; `sglang_weights.py` has those for weights.

    pause_generation   abort: running requests end with what they have
                       retract: they lose their KV and start again from it at /continue_generation
                       in_place: they stop where they are

`/flush_cache` and `/release_memory_occupation` answer 400 while requests run, as trainers expect that retry until the
server is idle. A paused one counts as idle: what it holds does not run, and loses nothing that it cannot compute again.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.dialects.bodies import NUM_RANKS, Nothing
from headrace.server.dialects.errors import answering, refuse, success_reply
from headrace.server.dialects.refresh import commit_if_open, engine_status, operate, weights_version
from headrace.server.dialects.sglang_weights import succeeded
from headrace.server.errors import json_response
from headrace.server.keys import require_admin, require_numbers
from headrace.server.operate import end_requests
from headrace.server.protocol.common import RequestModel
from headrace.server.version import VERSION

router = APIRouter(route_class=answering(success_reply), dependencies=[Depends(require_admin)], include_in_schema=False)
numbers = APIRouter(dependencies=[Depends(require_numbers)], include_in_schema=False)
refuse(
    router,
    ("/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter_from_tensors"),
    "this version has no adapters; merge them into the weights.",
)
refuse(router, ("/start_profile", "/stop_profile"), "profile the engine process with py-spy or perf.", ("GET", "POST"))

PAUSES: dict[str, dict[str, Any]] = {
    "abort": {"mode": "abort"},
    "retract": {"mode": "keep", "recompute": True},
    "in_place": {"mode": "keep"},
}
NOT_HELD = "cuda_graph"  # a tag for memory that this engine does not have


class Occupation(RequestModel):
    tags: list[str] | None = None

    def held(self) -> list[str] | None:
        return None if self.tags is None else [tag for tag in self.tags if tag != NOT_HELD]


class PauseRequest(RequestModel):
    mode: str = "abort"


class AbortBody(RequestModel):
    rid: str | list[str] | None = None
    abort_all: bool | None = None


@router.api_route("/release_memory_occupation", methods=["GET", "POST"])
async def release_memory(request: Request) -> Response:
    context = context_of(request)
    tags = (await read_body(request, Occupation, allow_empty=True)).held()
    _refuse_unless_idle(await engine_status(context), "release memory")
    if tags != []:
        await operate(context, "sleep", tags=tags, mode="keep")
    return succeeded("The memory is released.")


@router.api_route("/resume_memory_occupation", methods=["GET", "POST"])
async def resume_memory(request: Request) -> Response:
    """The KV cache comes back after an update, so this commits what is open."""
    context = context_of(request)
    tags = (await read_body(request, Occupation, allow_empty=True)).held()
    if tags is None or "kv_cache" in tags:
        await commit_if_open(context)
    if tags != []:
        await operate(context, "wake", tags=tags)
    return succeeded("The memory is taken again.")


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> Response:
    """After a commit no cached prefix is reachable, whoever still runs."""
    context = context_of(request)
    if await commit_if_open(context) is None:
        _refuse_unless_idle(await engine_status(context), "flush the cache")
        await operate(context, "reset_prefix_cache")
    return succeeded("The cache is flushed.")


def _refuse_unless_idle(status: dict[str, Any], what: str) -> None:
    num_running, num_waiting = status["num_running"], status["num_waiting"]
    if (num_running or num_waiting) and not status["is_paused"]:
        raise InvalidRequest(
            f"The server must be idle to {what}: {num_running} requests run, {num_waiting} wait.", code="not_idle"
        )


@router.post("/pause_generation")
async def pause(request: Request) -> Response:
    body = await read_body(request, PauseRequest, allow_empty=True)
    if body.mode not in PAUSES:
        raise refusal("mode", body.mode, ", ".join(PAUSES))
    await operate(context_of(request), "pause", **PAUSES[body.mode])
    return json_response({"message": "Generation is paused.", "status": "ok"})


@router.post("/continue_generation")
async def resume(request: Request) -> Response:
    """Commits what is open first. If that fails, the pause stays: the next call goes on with the old weights."""
    context = context_of(request)
    await read_body(request, Nothing, allow_empty=True)
    await commit_if_open(context)
    await operate(context, "resume")
    return json_response({"message": "Generation continues.", "status": "ok"})


@router.post("/abort_request")
async def abort(request: Request) -> Response:
    """`rid` is a whole id or several, no prefix. An unknown one is no error."""
    body = await read_body(request, AbortBody, allow_empty=True)
    names = [body.rid] if isinstance(body.rid, str) else body.rid or []
    names = [name for name in names if name]
    if not names and not body.abort_all:
        raise InvalidRequest("rid, or abort_all: true, must be given.", param="rid")
    num_aborted = await end_requests(context_of(request), None if body.abort_all else names)
    return succeeded(f"{num_aborted} were aborted.", aborted=num_aborted)


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    context = context_of(request)
    return json_response(
        {
            "model_path": context.config.engine.model.model,
            "tokenizer_path": context.config.engine.model.tokenizer or context.config.engine.model.model,
            "is_generation": True,
            "weight_version": await weights_version(context),
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    context = context_of(request)
    info, status = context.client.info, await engine_status(context)
    return json_response(
        {
            "model_path": context.config.engine.model.model,
            "served_model_name": context.served_names[0],
            "version": VERSION,
            "weight_version": status["version"],
            "tp_size": NUM_RANKS,
            "dp_size": 1,
            "context_length": info.max_model_len,
            "max_running_requests": info.max_num_seqs,
            "max_total_num_tokens": info.max_kv_tokens,
            "internal_states": [status],
        }
    )


@numbers.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Asked of the engine, not read from the board: trainers wait for the moment when it is 0."""
    context = context_of(request)
    status, seen = await engine_status(context), context.client.status()
    num_running, num_waiting = status["num_running"], status["num_waiting"]
    load = {
        "dp_rank": 0,
        "num_reqs": num_running + num_waiting,
        "num_total_reqs": num_running + num_waiting,
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_used_tokens": (seen.num_blocks - seen.num_free_blocks) * context.client.info.block_size,
        "max_total_num_tokens": context.client.info.max_kv_tokens,
        "token_usage": seen.kv_usage,
    }
    total = {name: value for name, value in load.items() if name.startswith("num_")}
    return json_response(
        {"timestamp": time.time(), "version": VERSION, "dp_rank_count": 1, "loads": [load], "aggregate": total}
    )


@numbers.get("/get_load")
async def get_load(request: Request) -> Response:
    """The old form."""
    context = context_of(request)
    status, seen = await engine_status(context), context.client.status()
    num_reqs = status["num_running"] + status["num_waiting"]
    num_tokens = (seen.num_blocks - seen.num_free_blocks) * context.client.info.block_size
    return json_response(
        [{"dp_rank": 0, "num_reqs": num_reqs, "num_waiting_reqs": status["num_waiting"], "num_tokens": num_tokens}]
    )
