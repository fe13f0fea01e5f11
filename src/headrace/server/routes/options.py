"""What both generation routes read from a request beside prompt and sampling: ids, deadline, the reply's shape."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from starlette.requests import Request

from headrace.processing.inputs import PreparedRequest, RequestOptions
from headrace.processing.structured import Found
from headrace.server.context import context_of
from headrace.server.protocol.common import GenerationRequest
from headrace.server.shape import ReplyShape
from headrace.types import SamplingParams


def request_options(
    request: Request,
    body: GenerationRequest,
    *,
    prefix: str,
    name: str | None,
    names: Mapping[str, str],
    default_max_tokens: int | None = None,
) -> RequestOptions:
    """`body` has been checked."""
    return RequestOptions(
        prefix=prefix,
        name=name,
        add_special_tokens=body.add_special_tokens,
        default_max_tokens=default_max_tokens,
        priority=body.priority or 0,
        timeout_s=body.timeout_s,
        cache_salt=body.cache_salt,
        trace_parent=context_of(request).trace_parent,
        names=names,
    )


def with_grammar(names: Mapping[str, str], grammar: Found | None) -> Mapping[str, str]:
    """What the request calls its parameters, the field that brought a grammar among them."""
    return names if grammar is None else {**names, "grammar": grammar[1]}


def constrained(params: SamplingParams, grammar: Found | None) -> SamplingParams:
    return params if grammar is None else replace(params, grammar=grammar[0])


def reply_shape(
    body: GenerationRequest, prepared: PreparedRequest, *, model: str, created: int, echo_texts: tuple[str, ...]
) -> ReplyShape:
    submit, stream_options = prepared.submit, body.stream_options
    return ReplyShape(
        id=submit.public_id,
        created=created,
        model=model,
        prompts=submit.prompts,
        n=submit.params.n,
        num_top=submit.params.logprobs,
        as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        echo_texts=echo_texts,
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
    )
