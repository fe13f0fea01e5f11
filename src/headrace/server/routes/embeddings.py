"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.processing.embedding import check_dimensions
from headrace.processing.inputs import PreparedRequest, RequestOptions
from headrace.server.body import keep_request_id, read_body
from headrace.server.context import context_of
from headrace.server.embedding_reply import EmbeddingReply
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.openapi import describe
from headrace.server.protocol.embeddings import EmbeddingRequest
from headrace.server.protocol.replies import EmbeddingList
from headrace.server.shape import Reply
from headrace.types import SamplingParams

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])


@router.post("/v1/embeddings", **describe(EmbeddingRequest, EmbeddingList))
async def create_embeddings(request: Request) -> Response:
    """Turns texts into vectors: the model's last hidden state, of the last token or the mean."""
    context = context_of(request)
    body = await read_body(request, EmbeddingRequest)
    model = context.model_name(body.model)
    name = keep_request_id(request, body.request_id)
    body.check()
    check_dimensions(body.dimensions, context.client.info)

    def make_reply(prepared: PreparedRequest, created: int) -> Reply:
        return EmbeddingReply(
            id=prepared.submit.public_id,
            created=created,
            model=model,
            dimensions=body.dimensions,
            is_normalised=body.normalize is not False,
            is_base64=body.encoding_format == "base64",
        )

    return await answer(
        request,
        Job(
            source=body.source(),
            params=SamplingParams(pooling=body.pooling or context.config.engine.model.pooling),
            options=RequestOptions(
                prefix="embd",
                name=name,
                add_special_tokens=body.add_special_tokens,
                truncate_to=body.truncate_prompt_tokens,
                priority=body.priority or 0,
                timeout_s=body.timeout_s,
                cache_salt=body.cache_salt,
                trace_parent=context.trace_parent,
                names=body.names,
            ),
            is_stream=False,
            make_reply=make_reply,
        ),
    )
