"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.processing.checks import check_token_ids
from headrace.server.body import read_body
from headrace.server.context import context_of
from headrace.server.errors import json_response
from headrace.server.keys import require_user
from headrace.server.openapi import describe
from headrace.server.protocol.replies import DetokenizeReply, TokenizeReply
from headrace.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

MAX_DETOKENIZED = 1_000_000

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])


@router.post("/tokenize", **describe(TokenizeRequest, TokenizeReply))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a rendered conversation, as generation would see them."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    context.model_name(body.model)
    info = context.client.info
    tokens = await context.inputs.tokenize(body.source(), add_special_tokens=body.add_special_tokens)
    reply: dict[str, Any] = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        reply["token_strs"] = await context.inputs.token_texts(tokens)
    return json_response(reply)


@router.post("/detokenize", **describe(DetokenizeRequest, DetokenizeReply))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    context.model_name(body.model)
    tokens = check_token_ids(body.tokens, "tokens", context.client.info.vocab_size, max_length=MAX_DETOKENIZED)
    text = await context.inputs.detokenize(tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response({"prompt": text})
