"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients. Errors have Anthropic's shape here."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.processing.inputs import RequestOptions
from headrace.server.body import keep_request_id, read_body
from headrace.server.context import context_of
from headrace.server.dialects.errors import answering
from headrace.server.errors import json_response
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.messages_reply import MessagesReply, error_reply
from headrace.server.openapi import describe
from headrace.server.protocol.messages import CountTokensRequest, MessagesRequest
from headrace.server.protocol.replies import Message, TokenCount
from headrace.server.routes.options import constrained, with_grammar

router = APIRouter(
    route_class=answering(error_reply, own_access=True), dependencies=[Depends(require_user)], tags=["Inference"]
)
NAMES = {"stop": "stop_sequences", "prompt": "messages"}


@router.post("/v1/messages", **describe(MessagesRequest, Message, streams=True))
async def create_message(request: Request) -> Response:
    """Answers a conversation in Anthropic's form, whole or as a stream of server-sent events."""
    context = context_of(request)
    body = await read_body(request, MessagesRequest)
    model = context.model_name(body.model)
    body.check(has_reasoning=context.parsing.has_reasoning)
    source, grammar = body.source(), body.reply_grammar(context.parsing)
    name = keep_request_id(request, None)
    message_id = f"msg_{uuid.uuid4().hex}"
    options = RequestOptions(
        prefix="msg",
        name=name,
        public_id=message_id,
        trace_parent=context.trace_parent,
        names=with_grammar(NAMES, grammar),
    )
    job = Job(
        source=source,
        params=constrained(body.params(context.sampling_defaults), grammar),
        options=options,
        is_stream=bool(body.stream),
        make_reply=lambda _prepared, _created: MessagesReply(message_id, model),
        make_parsing=lambda prepared: body.parsing(context.parsing, prepared, source),
        max_thinking=body.max_thinking(),
    )
    return await answer(request, job)


@router.post("/v1/messages/count_tokens", **describe(CountTokensRequest, TokenCount))
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has, as generation would see it."""
    context = context_of(request)
    body = await read_body(request, CountTokensRequest)
    context.model_name(body.model)
    body.check(has_reasoning=context.parsing.has_reasoning)
    tokens = await context.inputs.tokenize(body.source())
    return json_response({"input_tokens": len(tokens)})
