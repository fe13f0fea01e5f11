"""Checksums of the weights, for SGLang's `/weights_checker` and vLLM's `/weight_checker`.

    checksum  each tensor's, and one of all
    compare   with `baseline`, which is what `checksum` said before, or with the tensors in `path`

Where other servers keep a snapshot, the caller keeps the checksums: front ends share the engine and remember nothing.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.processing.checks import refusal
from headrace.server.context import ServerContext
from headrace.server.dialects.refresh import operate
from headrace.server.protocol.common import RequestModel

KEPT_BY_CALLERS = ("snapshot", "reset", "reset_tensors")


class CheckRequest(RequestModel):
    action: str = "checksum"
    baseline: dict[str, Any] | None = None
    path: str | None = None


async def check_weights(context: ServerContext, body: CheckRequest) -> dict[str, Any]:
    """`{"checksums", "total"}`, or `{"match", "mismatches"}`."""
    if body.action in KEPT_BY_CALLERS:
        raise InvalidRequest(
            f"action {body.action} is not available: keep the reply of checksum and send it as baseline of compare.",
            param="action",
            code="not_available",
        )
    if body.action == "checksum":
        result = await operate(context, "checksum")
        return {"checksums": result["tensors"], "total": result["total"]}
    if body.action != "compare":
        raise refusal("action", body.action, "checksum or compare")
    if body.path is not None:
        result = await operate(context, "compare", path=body.path)
        return {"match": result["match"], "mismatches": result["mismatches"]}
    if body.baseline is None:
        raise InvalidRequest("compare needs baseline (checksums by name) or path.", param="baseline")
    present = (await operate(context, "checksum"))["tensors"]
    baseline = body.baseline.get("checksums", body.baseline)
    names = sorted(present.keys() | baseline.keys())
    mismatches = [name for name in names if present.get(name) != baseline.get(name)]
    return {"match": not mismatches, "mismatches": mismatches}
