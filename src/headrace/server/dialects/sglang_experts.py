"""SGLang's recorder of expert loads, over the engine's window, which is never off.

start   a new window
stop    nothing: what is counted afterwards is in the window too
dump    `logical_count`, [layers with experts][experts], in the reply instead of a file
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.dialects.bodies import Nothing
from headrace.server.dialects.errors import answering, success_reply
from headrace.server.dialects.sglang_weights import succeeded
from headrace.server.keys import require_admin
from headrace.server.operate import control

router = APIRouter(route_class=answering(success_reply), dependencies=[Depends(require_admin)], include_in_schema=False)


@router.api_route("/start_expert_distribution_record", methods=["GET", "POST"])
async def start(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    await control(context_of(request), "experts", clear=True)
    return succeeded("A new window of expert loads has begun.")


@router.api_route("/stop_expert_distribution_record", methods=["GET", "POST"])
async def stop(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    await control(context_of(request), "experts")  # or the error of a model without experts
    return succeeded("Expert loads are counted on; dump before you generate more.")


@router.api_route("/dump_expert_distribution_record", methods=["GET", "POST"])
async def dump(request: Request) -> Response:
    await read_body(request, Nothing, allow_empty=True)
    report = await control(context_of(request), "experts")
    return succeeded(
        f"The loads of {report['window']['steps']} steps.",
        logical_count=report["tokens"],
        layers=report["layers"],
        window=report["window"],
    )
