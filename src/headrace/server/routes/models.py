"""GET /v1/models and /v1/models/{id}: the names under which the one model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.server.context import ServerContext, context_of
from headrace.server.errors import json_response
from headrace.server.keys import require_user
from headrace.server.openapi import describe
from headrace.server.protocol.replies import ModelCard, ModelList

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])


@router.get("/v1/models", **describe(None, ModelList))
async def list_models(request: Request) -> Response:
    """The served names."""
    context = context_of(request)
    return json_response({"object": "list", "data": [_card(context, name) for name in context.served_names]})


@router.get("/v1/models/{model_id:path}", **describe(None, ModelCard))
async def get_model(request: Request, model_id: str) -> Response:
    """One of them; 404 for any other."""
    context = context_of(request)
    return json_response(_card(context, context.model_name(model_id)))


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    info = context.client.info
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "headrace",
        "root": info.model,
        "max_model_len": info.max_model_len,
    }
