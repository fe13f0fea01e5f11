"""How a dialect says that something failed: one route class per dialect, so that no route catches anything itself.

Also `refuse`, which answers for the routes of a dialect that this server cannot serve. Refusals of `keys.py` are the
server's own and keep its error body.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import ErrorInfo, InvalidRequest, RequestError
from headrace.server.context import request_state
from headrace.server.errors import error_object, json_response

ErrorReply = Callable[[ErrorInfo], Response]
ACCESS = (401, 403)


def answering(reply: ErrorReply, *, own_access: bool = False) -> type[APIRoute]:
    """A `route_class` whose routes answer a RequestError with `reply`; with `own_access` also one of `keys.py`."""

    class DialectRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def answer(request: Request) -> Response:
                try:
                    return await handler(request)
                except RequestError as error:
                    if not own_access and error.info().status in ACCESS:
                        raise
                    request_state(request)["log"].setdefault("error", error.code)
                    return reply(error.info())

            return answer

    return DialectRoute


def success_reply(info: ErrorInfo) -> Response:
    """SGLang's and AReaL's form, which is always a 400; `error` tells more to those who look."""
    return json_response({"success": False, "message": info.message, **error_object(info)}, 400)


def refuse(router: APIRouter, paths: Iterable[str], why: str, methods: tuple[str, ...] = ("POST",)) -> None:
    """Adds routes that say why they cannot be served."""

    async def refused(request: Request) -> Response:
        raise InvalidRequest(f"{request.url.path} is not available: {why}", code="not_available")

    for path in paths:
        router.add_api_route(path, refused, methods=list(methods))
