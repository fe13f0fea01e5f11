"""vLLM's POST /inference/v1/generate: token ids in, token ids out, with the spans of the weights that made them.

Sampling fields have vLLM's names, inside `sampling_params`; the model's own defaults do not apply to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.errors import ErrorInfo
from headrace.processing.inputs import PreparedRequest, RequestOptions
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.server.body import keep_request_id, parse_model, read_body
from headrace.server.context import context_of
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.logprobs import chat_logprobs, prompt_logprobs
from headrace.server.openapi import describe
from headrace.server.protocol.replies import TokenGeneration
from headrace.server.protocol.token_generate import DEFAULT_MAX_TOKENS, SAMPLING, TokenGenerateRequest, TokenSampling
from headrace.server.routes.options import constrained, with_grammar
from headrace.server.shape import ChoiceParts, usage_object
from headrace.server.sse import DONE, encode, error_end
from headrace.types import SamplingParams, Usage

router = APIRouter(dependencies=[Depends(require_user)], tags=["Inference"])


@router.post("/inference/v1/generate", **describe(TokenGenerateRequest, TokenGeneration, streams=True))
async def generate(request: Request) -> Response:
    """Continues token ids, in vLLM's form."""
    context = context_of(request)
    body = await read_body(request, TokenGenerateRequest)
    context.model_name(body.model)
    body.check()
    sampling = parse_model(request, TokenSampling, body.sampling_params or {}, prefix=f"{SAMPLING}.")
    found = sampling.grammar()
    name = keep_request_id(request, body.request_id)
    fields = {field: f"{SAMPLING}.{field}" for field in SamplingParams.__struct_fields__}
    options = RequestOptions(
        prefix="generate",
        name=name,
        public_id=name,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        trace_parent=context.trace_parent,
        names=with_grammar({**fields, "prompt": "token_ids"}, found and (found[0], f"{SAMPLING}.{found[1]}")),
    )
    job = Job(
        source=[body.token_ids],
        params=constrained(sampling.sampling_params({}, logprobs=sampling.logprobs), found),
        options=options,
        is_stream=bool(body.stream),
        make_reply=lambda prepared, _: TokenReply(prepared, body.include_usage),
    )
    return await answer(request, job)


class TokenReply:
    """`Reply` of this route. Frames hold what is new of one choice."""

    def __init__(self, prepared: PreparedRequest, include_usage: bool) -> None:
        self._request_id = prepared.submit.public_id
        self._params = prepared.submit.params
        self._include_usage = include_usage
        self._unsent: dict[int, ChoiceParts] = {}
        self._has_sent_prompt = False

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> Any:
        rows = max((parts.prompt_logprobs for parts in choices), key=len, default=[])
        return {
            "request_id": self._request_id,
            "choices": [self._choice(index, parts) for index, parts in enumerate(choices)],
            **(self._of_prompt(rows) or {"prompt_logprobs": None}),
            "kv_transfer_params": None,
            "usage": usage_object(usage),
        }

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        frames = []
        for delta in deltas:
            unsent = self._unsent.setdefault(delta.choice, ChoiceParts())
            unsent.add(delta)
            if unsent.token_ids or unsent.finish_reason is not None:
                of_prompt = {} if self._has_sent_prompt else self._of_prompt(unsent.prompt_logprobs)
                self._has_sent_prompt = True
                frames.append(self._frame([self._choice(delta.choice, unsent)], **of_prompt))
                self._unsent[delta.choice] = ChoiceParts(versions=unsent.versions)
        return b"".join(frames)

    def end(self, usage: Usage) -> bytes:
        return self._frame([], usage=usage_object(usage)) + DONE if self._include_usage else DONE

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        return error_end(info)

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: %b\n\n" % encode({"request_id": self._request_id, "choices": choices, **more})

    def _of_prompt(self, rows: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The member for the prompt, if it was asked for; a stream has it in its first frame."""
        return {} if self._params.prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs(rows, as_ids=True)}

    def _choice(self, index: int, parts: ChoiceParts) -> dict[str, Any]:
        num_top, reason = self._params.logprobs, parts.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None if num_top is None else chat_logprobs(parts.logprobs, num_top, as_ids=True),
            "finish_reason": reason and reason.label,
            "token_ids": parts.token_ids,
        }
        if reason is not None:
            choice |= {"stop_reason": parts.stop_reason, "weight_versions": parts.versions.spans()}
        return choice
