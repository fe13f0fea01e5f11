"""Every error as the one body of http.md: `{"error": {message, type, param, code}}`, whatever raised it and where.

`app.py` installs the handlers; `sse.py` uses the same body inside a stream. No traceback leaves the process: what is
not a RequestError becomes a 500 in `middleware.py`, with the details in the log under the request id.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.errors import ErrorInfo, InternalError, InvalidRequest, MethodNotAllowed, NotFound, RequestError
from headrace.server.context import request_state

JSON = "application/json"
CLIENT_CLOSED = 499  # nobody reads it; logs and tests do


def error_object(info: ErrorInfo) -> dict[str, Any]:
    return {"error": {"message": info.message, "type": info.type, "param": info.param, "code": info.code}}


def error_response(info: ErrorInfo, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if info.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, info.retry_after_s))
    if info.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(msgspec.json.encode(error_object(info)), info.status, headers, JSON)


def json_response(value: Any, status: int = 200) -> Response:
    """A reply encoded by msgspec: fast, and NaN cannot get into it."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def internal_error(request_id: str) -> ErrorInfo:
    return InternalError(f"The server failed on this request; its log has the details under {request_id}.").info()


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    request_state(request)["log"].setdefault("error", error.code)
    return error_response(error.info())


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"There is no route {request.url.path}.{_hint(request)}").info())
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = (
            f"{request.url.path} does not take {request.method}; allowed: {headers.get('Allow', 'other methods')}."
        )
        return error_response(MethodNotAllowed(message).info(), headers)
    kind = InternalError if error.status_code >= 500 else InvalidRequest
    info = msgspec.structs.replace(kind(str(error.detail)).info(), status=error.status_code)
    return error_response(info, headers)


def _hint(request: Request) -> str:
    """For a base URL with a /v1 too many or too few, or a slash at the end."""
    path = request.url.path
    known = request.app.state.paths
    meant = next((near for near in (path.rstrip("/"), f"/v1{path}", path.removeprefix("/v1")) if near in known), None)
    return "" if meant is None else f" Did you mean {meant}?"


async def _on_validation_error(_: Request, error: Exception) -> Response:
    """Query and path parameters; bodies are read by `body.py`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:]) or None
    return error_response(InvalidRequest(f"{path}: {first['msg']}.", param=path).info())


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
