"""POST /v1/control/{abort,reset_prefix_cache}: operations of an operator or trainer, answered after their effect."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.openapi import describe
from headrace.server.protocol.control import AbortRequest, EmptyRequest
from headrace.server.protocol.replies import AbortOperation, Operation

router = APIRouter(prefix="/v1/control", dependencies=[Depends(require_admin)], tags=["Control"])


@router.post("/abort", **describe(AbortRequest, AbortOperation))
async def abort(request: Request) -> Response:
    """Ends requests in any state; `aborted` counts the choices that were alive. An unknown id is no error."""
    context = context_of(request)
    names = (await read_body(request, AbortRequest)).names()
    started = time.time()
    num_aborted = await context.client.abort(names=names, reason="control")
    operation = _succeeded("abort", started, [{"rank": 0, "aborted": num_aborted}])
    return json_response({"aborted": num_aborted, **operation})


@router.post("/reset_prefix_cache", **describe(EmptyRequest, Operation))
async def reset_prefix_cache(request: Request) -> Response:
    """Forgets cached prefixes; sequences that run keep what they hold."""
    context = context_of(request)
    await read_body(request, EmptyRequest, allow_empty=True)
    started = time.time()
    result = await context.client.control("reset_prefix_cache")
    return json_response(_succeeded("reset_prefix_cache", started, [{"rank": 0, **result}]))


def _succeeded(kind: str, started: float, result: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The operation object of an operation that has ended well; one that has not is an error reply."""
    return {
        "id": f"op-{uuid.uuid4().hex}",
        "kind": kind,
        "state": "succeeded",
        "error": None,
        "result": list(result),
        "started": started,
        "ended": time.time(),
    }
