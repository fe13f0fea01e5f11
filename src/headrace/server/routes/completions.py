"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.processing.inputs import PreparedRequest
from headrace.processing.tokenizer import Tokenizer
from headrace.server.body import keep_request_id, read_body
from headrace.server.completion_reply import CompletionReply
from headrace.server.context import context_of
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.openapi import describe
from headrace.server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from headrace.server.protocol.replies import Completion
from headrace.server.routes.options import constrained, reply_shape, request_options, with_grammar
from headrace.server.shape import Reply

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])


@router.post("/v1/completions", **describe(CompletionRequest, Completion, streams=True))
async def create_completion(request: Request) -> Response:
    """Continues one or more prompts, whole or as a stream of server-sent events."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    model = context.model_name(body.model)
    name = keep_request_id(request, body.request_id)
    body.check()
    grammar = body.grammar()
    options = request_options(
        request,
        body,
        prefix="cmpl",
        name=name,
        names=with_grammar(body.names, grammar),
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )

    def make_reply(prepared: PreparedRequest, created: int) -> Reply:
        echo_texts = _echo_texts(prepared, context.tokenizer) if body.echo else ()
        shape = reply_shape(body, prepared, model=model, created=created, echo_texts=echo_texts)
        return CompletionReply(shape, context.tokenizer, body.prompt_logprobs)

    return await answer(
        request,
        Job(
            source=body.source(),
            params=constrained(body.params(context.sampling_defaults), grammar),
            options=options,
            is_stream=bool(body.stream),
            make_reply=make_reply,
        ),
    )


def _echo_texts(prepared: PreparedRequest, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The prompts as they were given; those given as ids, decoded with their special tokens."""
    return tuple(
        tokenizer.decode(ids, skip_special_tokens=False) if text is None else text
        for ids, text in zip(prepared.submit.prompts, prepared.texts, strict=True)
    )
