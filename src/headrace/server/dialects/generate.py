"""POST and PUT /generate, with and without a slash at the end: SGLang's and TRL's, told apart by the body.

A body with `prompts` is TRL's (`trl_generate.py`); all others are SGLang's. Errors have the server's own body, which
has SGLang's `error.message`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_text
from headrace.processing.inputs import PreparedRequest, RequestOptions
from headrace.server.body import decode_object, keep_request_id, parse_model
from headrace.server.context import ServerContext, context_of
from headrace.server.dialects import trl_generate
from headrace.server.dialects.generate_reply import GenerateReply, GenerateShape
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.openapi import describe
from headrace.server.protocol.common import RequestModel
from headrace.server.protocol.generate import (
    DEFAULT_MAX_NEW_TOKENS,
    SAMPLING,
    GenerateRequest,
    GenerateSampling,
    LogprobWish,
    num_logprobs,
)
from headrace.server.protocol.replies import GenerateOutput
from headrace.server.routes.options import constrained, with_grammar
from headrace.types import ALL_LOGPROBS

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])
PREFIX = "generate"
LOGPROB_NAMES = {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}


@router.put("/generate", include_in_schema=False)
@router.put("/generate/", include_in_schema=False)
@router.post("/generate/", include_in_schema=False)
@router.post("/generate", **describe(GenerateRequest, GenerateOutput, streams=True, or_list=True))
async def generate(request: Request) -> Response:
    """Continues prompts, tokens in and tokens out, in SGLang's form; with `prompts` in TRL's."""
    data = decode_object(await request.body())
    if "prompts" in data:
        return await trl_generate.generate(request, data)
    body = parse_model(request, GenerateRequest, without_idle(data, GenerateRequest))
    prompts = body.prompts()
    sampling = parse_model(
        request, GenerateSampling, without_idle(body.sampling(), GenerateSampling), prefix=f"{SAMPLING}."
    )
    grammar = sampling.constraint()
    context = context_of(request)
    wishes = body.wishes(len(prompts), context.client.info.vocab_size)
    _check_wishes(context, wishes)
    if body.extra_key is not None:
        check_text(body.extra_key, "extra_key", max_chars=256)
    rids = body.rids(len(prompts))
    name = keep_request_id(request, rids[0] if rids else None)
    ids = rids or ([name] if name and body.is_single else [])
    options = RequestOptions(
        prefix=PREFIX,
        name=name,
        public_id=ids[0] if ids else None,
        more_names=tuple(ids[1:]),
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        priority=body.priority or 0,
        cache_salt=body.extra_key,
        trace_parent=context.trace_parent,
        names=with_grammar({**sampling.names, **LOGPROB_NAMES, "prompt": body.prompt_field}, grammar),
    )

    def make_reply(prepared: PreparedRequest, created: int) -> GenerateReply:
        submit = prepared.submit
        shape = GenerateShape(
            ids=ids or [submit.public_id] * len(prompts),
            prompts=submit.prompts,
            n=submit.params.n,
            wishes=wishes,
            with_text=bool(body.return_text_in_logprobs),
            is_single=body.is_single,
            scores_only=sampling.max_new_tokens == 0,
            weights_version=context.client.status().weights_version,
        )
        return GenerateReply(shape, context.tokenizer)

    job = Job(
        source=prompts,
        params=constrained(sampling.params(*num_logprobs(wishes)), grammar),
        options=options,
        is_stream=bool(body.stream),
        make_reply=make_reply,
    )
    return await answer(request, job)


def without_idle(data: dict[str, Any], model: type[RequestModel]) -> dict[str, Any]:
    """Without the fields that are not served and say nothing: clients send `return_routed_experts: false` too."""
    return {name: value for name, value in data.items() if value or name not in model.UNSUPPORTED}


def _check_wishes(context: ServerContext, wishes: list[LogprobWish | None]) -> None:
    wants_all = any(wish is not None and wish.token_ids for wish in wishes)
    if wants_all and context.config.admission.max_logprobs != ALL_LOGPROBS:
        raise InvalidRequest(
            "token_ids_logprob looks at the whole vocabulary, for which the server must run with --max-logprobs -1.",
            param="token_ids_logprob",
            code="unsupported_field",
        )
