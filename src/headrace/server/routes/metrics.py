"""GET /metrics (Prometheus) and /v1/load: numbers for dashboards and balancers."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.observability.prometheus import CONTENT_TYPE
from headrace.server.context import context_of
from headrace.server.errors import json_response
from headrace.server.keys import require_numbers
from headrace.server.openapi import describe
from headrace.server.protocol.replies import Load

router = APIRouter(dependencies=[Depends(require_numbers)], tags=["Numbers"])


@router.get("/metrics", **describe(None, None, text="Prometheus' text format."))
async def metrics(request: Request) -> Response:
    """The engine's series, and what all front ends have counted together."""
    return Response(context_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/load", **describe(None, Load))
async def load(request: Request) -> Response:
    """Running, waiting and queued work, free blocks and the prefix hit rate, in all and per rank."""
    status = context_of(request).client.status()
    totals = {
        "running": status.num_running,
        "waiting": status.num_waiting,
        "queued_tokens": status.num_queued_tokens,
        "free_blocks": status.num_free_blocks,
        "num_blocks": status.num_blocks,
        "kv_usage": status.kv_usage,
        "prefix_hit_rate": status.prefix_hits / status.prefix_queries if status.prefix_queries else 0.0,
    }
    rank = {
        "rank": 0,
        **totals,
        "heartbeat_age_s": status.heartbeat_age_s,
        "step": status.step,
        "weights_version": status.weights_version,
    }
    return json_response({**totals, "ranks": [rank]})
