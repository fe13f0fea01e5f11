"""What wraps every route, as plain ASGI: request id, trace, log line, the 500 of last resort, the limit on bodies.

Plain ASGI and not Starlette's BaseHTTPMiddleware, which hides disconnects from the routes. CORS is Starlette's own,
outside.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import RequestError, RequestTooLarge
from headrace.observability.logs import event
from headrace.observability.tracing import checked_trace_parent, trace_id_of
from headrace.processing.checks import check_name
from headrace.server.context import ServerContext
from headrace.server.errors import error_response, internal_error

if TYPE_CHECKING:
    from headrace.observability.otel import Trace

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
MAX_PATH_CHARS = 500
QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics", "/v1/load", "/version"})


def past_middleware(app: ASGIApp) -> ASGIApp:
    """Keeps the server's own `send` for the events of a stream: middleware looks at the head of a response alone, and
    five wrappers around each event would cost more than the event."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["send_body"] = send
        await app(scope, receive, send)

    return outermost


class RequestMiddleware:
    """Gives each request its id and its trace, and whatever happens a reply and one log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(request_id=uuid.uuid4().hex, caller_id=None, headers={}, log={}, received=started)
        state.setdefault("send_body", send)
        trace_parent, trace = _open_trace(scope, started)
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = state["request_id"]
                for name, value in state["headers"].items():
                    headers[name] = value
            await send(message)

        try:
            given = Headers(scope=scope).get(REQUEST_ID)
            if given is not None:
                state["request_id"] = state["caller_id"] = check_name(given, REQUEST_ID)
            await self._app(scope, receive, tagged)
        except RequestError as error:  # raised by a middleware: the routes' own are answered further in
            state["log"].setdefault("error", error.code)
            if not status:
                await error_response(error.info())(scope, receive, tagged)
        except Exception:
            state["log"].setdefault("error", "internal_error")
            logger.exception("request failed", extra={"headrace_fields": {"request_id": state["request_id"]}})
            if not status:
                await error_response(internal_error(state["request_id"]))(scope, receive, tagged)
        finally:
            ended = time.monotonic()
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            event(
                logger,
                level,
                "http",
                request_id=state["request_id"],
                trace_id=trace_id_of(trace_parent),
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=ended - started,
                **state["log"],
            )
            if trace is not None:
                _end_trace(trace, scope, status, ended)
            # The server's cycle of request and response holds this state: what it held, prompts among it, would stay
            # until the collector comes, and that would take long.
            state.pop("send_body", None)


def _open_trace(scope: Scope, started: float) -> tuple[str | None, Trace | None]:
    """The request's place in a trace, as text and as its span; leaves both in the request's own context."""
    headers = Headers(scope=scope)
    trace_parent = checked_trace_parent(headers.get("traceparent"))
    context: ServerContext = scope["app"].state.context
    trace = None
    if context.tracer is not None and scope["path"] not in QUIET_PATHS:
        trace = context.tracer.start(trace_parent, headers.get("tracestate"), started)
        trace_parent = trace_parent if trace is None else trace.trace_parent
    if trace_parent is not None:
        scope["state"]["context"] = replace(context, trace=trace, trace_parent=trace_parent)
    return trace_parent, trace


def _end_trace(trace: Trace, scope: Scope, status: int, ended: float) -> None:
    state = scope["state"]
    error: str | None = state["log"].get("error")
    attributes = {
        "http.request.method": scope["method"],
        "url.path": scope["path"][:MAX_PATH_CHARS],
        "http.response.status_code": status,
        "headrace.request_id": state["request_id"],
        "error.type": error,
    }
    is_client_s_fault = 400 <= status < 500  # which is no failure of the server's span
    trace.end(ended, attributes, None if is_client_s_fault else error)


class BodyLimitMiddleware:
    """Refuses a body by its declared length, and counts the bytes of one that declares none, once a route reads it.

    A route that takes larger bodies sets `max_body_bytes` in the request's state before it reads.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope["state"]
        state["max_body_bytes"] = self._limit
        text = Headers(scope=scope).get("content-length", "")[:20]
        declared = int(text) if text.isdecimal() else 0
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            limit: int = state["max_body_bytes"]
            if declared > limit:
                raise _too_large(limit, str(declared))
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > limit:
                    raise _too_large(limit, f"{num_bytes} so far")
            return message

        async def closing(message: Message) -> None:
            """Nobody reads the rest of a body that is too long, so the connection cannot carry another request."""
            if message["type"] == "http.response.start" and max(declared, num_bytes) > state["max_body_bytes"]:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, counted, closing)


def _too_large(limit: int, given: str) -> RequestTooLarge:
    return RequestTooLarge(f"The body may have at most {limit} bytes, not {given}.")
