"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.processing.inputs import PreparedRequest
from headrace.server.body import keep_request_id, read_body
from headrace.server.chat_reply import ChatReply
from headrace.server.context import context_of
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.openapi import describe
from headrace.server.protocol.chat import ChatCompletionRequest
from headrace.server.protocol.replies import ChatCompletion
from headrace.server.routes.options import constrained, reply_shape, request_options, with_grammar
from headrace.server.shape import Reply

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])


@router.post("/v1/chat/completions", **describe(ChatCompletionRequest, ChatCompletion, streams=True))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of server-sent events."""
    context = context_of(request)
    body = await read_body(request, ChatCompletionRequest)
    model = context.model_name(body.model)
    name = keep_request_id(request, body.request_id)
    body.check()
    grammar, max_thinking = body.reply_grammar(context.parsing), body.max_thinking()
    options = request_options(request, body, prefix="chatcmpl", name=name, names=with_grammar(body.names, grammar))

    def make_reply(prepared: PreparedRequest, created: int) -> Reply:
        shape = reply_shape(body, prepared, model=model, created=created, echo_texts=body.echo_texts())
        return ChatReply(shape, has_reasoning=context.parsing.has_reasoning)

    return await answer(
        request,
        Job(
            source=body.source(),
            params=constrained(body.params(context.sampling_defaults), grammar),
            options=options,
            is_stream=bool(body.stream),
            make_reply=make_reply,
            make_parsing=lambda prepared: body.parsing(context.parsing, prepared),
            max_thinking=max_thinking,
        ),
    )
