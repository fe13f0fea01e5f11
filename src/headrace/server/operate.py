"""Control operations as routes ask for them: the engine hears which trace asks, and a traced one gets its span.

Every route and dialect comes through here; the engine holds the rules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.errors import FailedRequest, RequestError
from headrace.processing.checks import INT64_MAX, refusal
from headrace.server.context import ServerContext

MAX_PATH_CHARS = 200
QUERIES = frozenset({"status", "operations", "experts", "expert_tokens"})


async def control(context: ServerContext, kind: str, **arguments: Any) -> dict[str, Any]:
    """The operation object, or the answer to a query. Raises RequestError as the engine reports it."""
    _check_integers(arguments, "")
    if kind in QUERIES:
        return await context.client.control(kind, **arguments)
    started_s = time.monotonic()
    try:
        done = await context.client.control(kind, trace_parent=context.trace_parent, **arguments)
    except RequestError as error:
        known = error.operation if isinstance(error, FailedRequest) else None
        _record(context, started_s, known or {"kind": kind, "state": "refused"}, error.code)
        raise
    _record(context, started_s, done)
    return done


def _check_integers(value: Any, path: str) -> None:
    """JSON's integers have no end; those of the messages to the engine have 64 bits."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_integers(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_integers(item, f"{path}[{index}]")
    elif type(value) is int and not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise refusal(path[:MAX_PATH_CHARS], value, "an integer of 64 bits")


async def end_requests(context: ServerContext, names: Sequence[str] | None) -> int:
    """Ends requests by any of their names, or all; how many choices were alive."""
    started_s = time.monotonic()
    num_aborted = await context.client.abort(names=names, reason="control")
    _record(context, started_s, {"kind": "abort", "state": "succeeded"})
    return num_aborted


def _record(context: ServerContext, started_s: float, operation: dict[str, Any], error: str | None = None) -> None:
    """A span up to the answer: of an operation that runs on (`wait: false`) it says that it is running."""
    if context.trace is None:
        return
    attributes = {
        "headrace.operation.kind": operation["kind"],
        "headrace.operation.id": operation.get("id"),
        "headrace.operation.state": operation["state"],
        "headrace.weights_version": context.client.status().weights_version,
    }
    context.trace.child("control", started_s, time.monotonic(), attributes, error)
