"""/v1/control: operations of an operator or a trainer, answered after their effect, and what can be asked about them.

An operation runs in the engine, one at a time, and its object is the reply; `wait: false` replies 202 with it while it
runs. Aborts and questions are answered whatever else runs. The engine checks what the operations mean.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.observability.logs import LEVELS
from headrace.observability.tracing import trace_id_of
from headrace.processing.checks import check_name
from headrace.server.body import read_body
from headrace.server.context import context_of, request_state
from headrace.server.errors import json_response
from headrace.server.keys import require_admin
from headrace.server.openapi import describe
from headrace.server.operate import control, end_requests
from headrace.server.protocol import control as bodies
from headrace.server.protocol.replies import AbortOperation, ControlStatus, LogLevel, Operation, OperationList
from headrace.server.spool import remove
from headrace.server.weights_body import FRAME, SAFETENSORS, Model, read_weights

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/control", dependencies=[Depends(require_admin)], tags=["Control"])

OPERATIONS: tuple[tuple[str, type[bodies.ControlRequest], str], ...] = (
    ("pause", bodies.PauseRequest, "Stops the steps; new requests wait."),
    ("resume", bodies.ControlRequest, "Ends a pause."),
    ("drain", bodies.DrainRequest, "Refuses new requests; answered when those that are there have ended."),
    ("undrain", bodies.ControlRequest, "Takes requests again."),
    ("sleep", bodies.SleepRequest, "Gives back the memory of weights, KV or both."),
    ("wake", bodies.WakeRequest, "Takes it again; weights come from where they were last loaded."),
    ("begin_refresh", bodies.BeginRefreshRequest, "Opens a refresh, for weights that come in parts."),
    ("commit_refresh", bodies.CommitRefreshRequest, "Puts the applied weights in place, all at once."),
    ("abort_refresh", bodies.ControlRequest, "Gives an open refresh up. None open is no error."),
    ("set_version", bodies.SetVersionRequest, "Names the present weights."),
    ("checksum", bodies.ChecksumRequest, "Checksums of the present weights."),
    ("compare", bodies.CompareRequest, "Whether the present weights are those of a folder or file."),
    ("get_weight", bodies.GetWeightRequest, "The first values of one tensor."),
    ("join_group", bodies.JoinGroupRequest, "Joins a trainer's process group."),
    ("leave_group", bodies.LeaveGroupRequest, "Leaves it."),
    ("reset_prefix_cache", bodies.ControlRequest, "Forgets cached prefixes; running sequences keep what they hold."),
    ("rebalance_experts", bodies.RebalanceRequest, "Moves experts between ranks, or says what moving would bring."),
)
WITH_WEIGHTS: tuple[tuple[str, Model, str], ...] = (
    ("refresh_weights", bodies.RefreshWeightsRequest, "New weights as one transaction."),
    ("apply_refresh", bodies.ApplyRefreshRequest, "Some tensors for the open refresh. A failure leaves it open."),
)
BODIES = {
    FRAME: "The length of a JSON object (8 bytes, little-endian), the object, then the tensors. The object holds "
    "format (raw, safetensors, sparse or pickle), names, dtypes, shapes, offsets and the other fields but source.",
    SAFETENSORS: "A safetensors file; the other fields are in the query.",
}


def _add_operation(kind: str, model: type[bodies.ControlRequest], summary: str) -> None:
    @router.post(f"/{kind}", summary=summary, name=kind, **describe(model, Operation, may_run_on=True))
    async def operation(request: Request) -> Response:
        body = await read_body(request, model, allow_empty=True)
        return await _run(request, kind, body.arguments())


def _add_operation_with_weights(kind: str, model: Model, summary: str) -> None:
    described = describe(model, Operation, may_run_on=True, other_bodies=BODIES)

    @router.post(f"/{kind}", summary=summary, name=kind, **described)
    async def operation(request: Request) -> Response:
        body = await read_weights(request, model)
        try:
            return await _run(request, kind, body.arguments)
        except BaseException:
            if body.spooled is not None:  # it may never have been opened
                await remove(body.spooled)
            raise


for _operation in OPERATIONS:
    _add_operation(*_operation)
for _refresh in WITH_WEIGHTS:
    _add_operation_with_weights(*_refresh)


@router.post("/abort", **describe(bodies.AbortRequest, AbortOperation))
async def abort(request: Request) -> Response:
    """Ends requests in any state; `aborted` counts the choices that were alive. An unknown id is no error."""
    names = (await read_body(request, bodies.AbortRequest)).names()
    started = time.time()
    context = context_of(request)
    num_aborted = await end_requests(context, names)
    return json_response(
        {
            "aborted": num_aborted,
            "id": f"op-{uuid.uuid4().hex}",
            "kind": "abort",
            "state": "succeeded",
            "error": None,
            "result": [{"rank": 0, "aborted": num_aborted}],
            "started": started,
            "ended": time.time(),
            "deadline": None,
            "trace_id": trace_id_of(context.trace_parent),
        }
    )


@router.post("/log_level", **describe(bodies.LogLevelRequest, LogLevel))
async def log_level(request: Request) -> Response:
    """Changes the log level of every process of the server, within a second or so; no restart keeps it."""
    level = (await read_body(request, bodies.LogLevelRequest)).level
    context_of(request).set_log_level(LEVELS[level])
    logger.warning("the log level is %s from now on", level)
    return json_response({"level": level})


@router.get("/status", **describe(None, ControlStatus))
async def status(request: Request) -> Response:
    """Weights, sleep, pause, and what runs at present."""
    return json_response(await control(context_of(request), "status"))


@router.get("/operations", **describe(None, OperationList))
async def operations(request: Request) -> Response:
    """The last operations, at most 100, the newest first."""
    return json_response(await control(context_of(request), "operations"))


@router.get("/operations/{operation_id}", **describe(None, Operation))
async def operation(request: Request, operation_id: str) -> Response:
    """One operation."""
    found = await control(context_of(request), "operations", id=check_name(operation_id, "id"))
    return json_response(found["operations"][0])


@router.post("/operations/{operation_id}/cancel", **describe(bodies.EmptyRequest, Operation))
async def cancel(request: Request, operation_id: str) -> Response:
    """Ends a running operation as cancelled; whoever waits for it gets an error."""
    await read_body(request, bodies.EmptyRequest, allow_empty=True)
    return await _run(request, "cancel", {"id": check_name(operation_id, "id")})


async def _run(request: Request, kind: str, arguments: dict[str, Any]) -> Response:
    reply = await control(context_of(request), kind, **arguments)
    request_state(request)["log"]["operation"] = reply["id"]
    return json_response(reply, 202 if reply["state"] in ("pending", "running") else 200)
