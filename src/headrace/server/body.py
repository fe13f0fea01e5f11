"""Reads a request's JSON body into its model: strict JSON, strict types, unknown fields reported, later fields refused.

msgspec parses, because it is several times faster than the standard library, and takes neither NaN nor half surrogates;
pydantic checks the shape. Routes call `read_body`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import Request

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_name, refusal, shown
from headrace.server.context import context_of, request_state
from headrace.server.protocol.common import RequestModel

UNKNOWN_FIELDS = "X-Headrace-Unknown-Fields"
MAX_NAMED_FIELDS = 16

Model = TypeVar("Model", bound=RequestModel)


async def read_body(request: Request, model: type[Model], *, allow_empty: bool = False) -> Model:
    """Raises InvalidRequest with the path of the first bad field."""
    raw = await request.body()
    return parse_model(request, model, {} if allow_empty and not raw.strip() else decode_object(raw))


def parse_model(
    request: Request, model: type[Model], data: dict[str, Any], *, prefix: str = "", is_text: bool = False
) -> Model:
    """`data` as its model. `prefix` is its path within the body; `is_text`: numbers and the like came as text."""
    for name, advice in model.UNSUPPORTED.items():
        if data.get(name) is not None:
            path = prefix + name
            raise InvalidRequest(f"{path} is not supported: {advice}", param=path, code="unsupported_field")
    try:
        parsed = model.model_validate(data, strict=not is_text)
    except ValidationError as error:
        raise _first_error(error, data, prefix) from None
    _report_unknown(request, [prefix + name for name in parsed.unknown_fields()])
    return parsed


def decode_object(raw: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is no valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {shown(data)}.", code="invalid_json")
    return data


def keep_request_id(request: Request, request_id: str | None) -> str | None:
    """The caller's name for the request: the body's, else the header's. The reply and the log line carry it."""
    state = request_state(request)
    if request_id is not None:
        state["request_id"] = state["caller_id"] = check_name(request_id, "request_id")
    name: str | None = state["caller_id"]
    return name


def _first_error(error: ValidationError, data: Any, prefix: str) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    path, value = prefix, data
    for part in first["loc"]:
        if isinstance(part, int) and isinstance(value, list):
            path += f"[{part}]"
        elif isinstance(value, dict) and (part in value or first["type"] == "missing"):
            path += f".{part}" if path != prefix else str(part)
        else:
            continue  # pydantic's word for a branch of a union, which is no part of the body
        value = value.get(part) if isinstance(value, dict) else value[part]
    path = path[:200].encode("ascii", "backslashreplace").decode("ascii")
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is missing.", param=path, code="missing_field")
    if (allowed := first["msg"].removeprefix("Input should be ")) != first["msg"]:
        return refusal(path, first["input"], allowed)
    return InvalidRequest(f"{path}: {first['msg']}, not {shown(first['input'])}.", param=path)


def _report_unknown(request: Request, names: list[str]) -> None:
    if not names:
        return
    if context_of(request).config.admission.strict_fields:
        raise InvalidRequest(
            f"{shown(names[0])} is not a field of this route (--strict-fields).",
            param=names[0][:128],
            code="unknown_field",
        )
    named = [name[:64].encode("ascii", "backslashreplace").decode("ascii") for name in names[:MAX_NAMED_FIELDS]]
    printable = ("".join(c for c in name if " " < c <= "~" and c != ",") or "?" for name in named)
    more = [f"+{len(names) - MAX_NAMED_FIELDS}"] if len(names) > MAX_NAMED_FIELDS else []
    headers = request_state(request)["headers"]
    before = [headers[UNKNOWN_FIELDS]] if UNKNOWN_FIELDS in headers else []
    headers[UNKNOWN_FIELDS] = ",".join([*before, *printable, *more])
