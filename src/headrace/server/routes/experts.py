"""GET /v1/experts: which experts are busy, where they are, how even that is.

`/v1/control/rebalance_experts` moves them.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.server.context import context_of
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.openapi import describe
from headrace.server.operate import control
from headrace.server.protocol.expert_replies import Experts

router = APIRouter(dependencies=[Depends(require_admin)], tags=["Control"])


@router.get("/v1/experts", **describe(None, Experts))
async def experts(request: Request, clear: bool = False) -> Response:
    """Loads, map, balance, the last run and the last decision; `clear` begins a new window. 409 without experts."""
    return json_response(await control(context_of(request), "experts", clear=clear))
