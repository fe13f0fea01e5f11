"""Time limits that come in a request's headers, in seconds; every route that generates takes them.

X-Request-Timeout   of the whole request, waiting included; the body's timeout_s holds too, if it is shorter
X-Queue-Timeout     until the request is started; once it runs it is left alone

A proxy sets them without knowing the body. What they do not limit, the server's defaults do (--default-timeout-s,
--default-queue-timeout-s). Past either the answer is 504.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from starlette.requests import Request

from headrace.processing.checks import check_number, refusal
from headrace.processing.inputs import RequestOptions
from headrace.server.protocol.common import MAX_TIMEOUT_S

REQUEST_TIMEOUT: Final = "X-Request-Timeout"
QUEUE_TIMEOUT: Final = "X-Queue-Timeout"
_ALLOWED: Final = f"seconds in (0, {MAX_TIMEOUT_S:g}]"


def limited(request: Request, options: RequestOptions) -> RequestOptions:
    """The options with the headers' limits. Raises InvalidRequest that names the header."""
    whole, waiting = _seconds(request, REQUEST_TIMEOUT), _seconds(request, QUEUE_TIMEOUT)
    if whole is not None and options.timeout_s is not None:
        whole = min(whole, options.timeout_s)
    if whole is None and waiting is None:
        return options
    return replace(options, timeout_s=options.timeout_s if whole is None else whole, queue_timeout_s=waiting)


def _seconds(request: Request, header: str) -> float | None:
    value = request.headers.get(header)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        raise refusal(header, value, _ALLOWED) from None
    return check_number(number, header, 0.0, MAX_TIMEOUT_S, _ALLOWED, open_low=True)
