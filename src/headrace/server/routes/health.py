"""Probes, without a key: is the process alive, can it serve, does a token really come out.

/livez             200 while the event loop turns
/readyz, /health   200, or 503 with the reasons: starting, draining, engine_dead, engine_stalled, rank_1_stalled, ...;
                   of a model on several ranks also the heartbeat of each
/ping              the same, also by POST
HEAD               to any of these answers with the status alone
/health_generate   one token through the real queue, first in line; 503 or 504 with the reason after 4.5 s at most;
                   while paused 200 without a token
/version
"""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import FailedRequest, Unavailable
from headrace.processing.inputs import request_names
from headrace.server.context import ServerContext, context_of
from headrace.server.errors import error_object, json_response
from headrace.server.openapi import describe
from headrace.server.protocol.probe_replies import Readiness, VersionReply
from headrace.server.version import VERSION
from headrace.transport.messages import Submit
from headrace.types import FinishReason, SamplingParams

PROBE_TIMEOUT_S = 4.5  # RL health monitors give up, and restart the server, after 5 s
PROBE_PRIORITY = -(2**31)  # ahead of every request: a long queue is no illness

router = APIRouter(tags=["Probes"])


@router.get("/livez", **describe(None, Readiness))
@router.head("/livez", include_in_schema=False)
async def livez() -> Response:
    """Answers while the process and its event loop are alive."""
    return json_response({"status": "alive", "reasons": []})


@router.get("/readyz", **describe(None, Readiness))
@router.get("/health", **describe(None, Readiness))
@router.get("/ping", **describe(None, Readiness))
@router.post("/ping", **describe(None, Readiness))
@router.head("/readyz", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
async def readyz(request: Request) -> Response:
    """Whether requests are served; 503 with the reasons when not."""
    return _readiness(context_of(request))


@router.get("/health_generate", **describe(None, Readiness))
async def health_generate(request: Request) -> Response:
    """Generates one token through the same queue as real work."""
    context = context_of(request)
    if context.reasons():
        return _readiness(context)
    if (
        context.client.status().is_paused
    ):  # a token would wait for the trainer; whoever kills for that kills the healthy
        return json_response({"status": "paused", "reasons": []})
    info = context.client.info
    token_id = next(iter(context.tokenizer.encode("a", add_special_tokens=False)), 0)
    public_id, aliases = request_names("health", None)
    submit = Submit(
        request_id=context.client.next_request_id(),
        public_id=public_id,
        aliases=aliases,
        prompts=((min(token_id, info.vocab_size - 1),),),
        params=SamplingParams(max_tokens=1, temperature=0.0, seed=0),
        priority=PROBE_PRIORITY,
        timeout_s=PROBE_TIMEOUT_S,
    )
    stream = context.client.submit(submit)
    try:
        async for deltas in stream:
            for delta in deltas:
                if delta.error is not None:
                    raise FailedRequest(delta.error)
                if delta.finish_reason is FinishReason.ABORT:
                    raise Unavailable("The probe was ended by a control operation.", code="aborted")
    finally:
        stream.close("disconnect")
    return json_response({"status": "ok", "reasons": []})


@router.get("/version", **describe(None, VersionReply))
async def version() -> Response:
    """The server's version."""
    return json_response({"version": VERSION})


def _readiness(context: ServerContext) -> Response:
    reasons = context.reasons()
    ranks = [dataclasses.asdict(rank) for rank in context.client.status().ranks]
    shown = {"ranks": ranks} if ranks else {}
    if not reasons:
        return json_response({"status": "ready", "reasons": [], **shown})
    error = Unavailable(f"The server is not ready: {', '.join(reasons)}.", code=reasons[0])
    return json_response({"status": "not_ready", "reasons": reasons, **shown, **error_object(error.info())}, 503)
