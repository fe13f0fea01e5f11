"""What wraps every route, as plain ASGI: request id, log line, the 500 of last resort, and the limit on bodies.

Plain ASGI and not Starlette's BaseHTTPMiddleware, which hides disconnects from the routes. CORS is Starlette's own,
outside.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import RequestError, RequestTooLarge
from headrace.observability.logs import event
from headrace.processing.checks import check_name
from headrace.server.errors import error_response, internal_error

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
QUIET_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics", "/v1/load", "/version"})


class RequestMiddleware:
    """Gives each request its id, and whatever happens a reply and one log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        state: dict[str, Any] = scope.setdefault("state", {})
        state.update(request_id=uuid.uuid4().hex, caller_id=None, headers={}, log={}, received=started)
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
            if not status:
                await error_response(error.info())(scope, receive, tagged)
        except Exception:
            logger.exception("request failed", extra={"headrace_fields": {"request_id": state["request_id"]}})
            if not status:
                await error_response(internal_error())(scope, receive, tagged)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            event(
                logger,
                level,
                "http",
                request_id=state["request_id"],
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=time.monotonic() - started,
                **state["log"],
            )


class BodyLimitMiddleware:
    """Refuses a body by its declared length, and counts the bytes of one that declares none."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limit:
            response = error_response(self._too_large(declared[:20]).info(), {"Connection": "close"})
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._limit:
                    raise self._too_large(f"{num_bytes} so far")
            return message

        await self._app(scope, counted, send)

    def _too_large(self, given: str) -> RequestTooLarge:
        return RequestTooLarge(f"The body may have at most {self._limit} bytes, not {given}.")
