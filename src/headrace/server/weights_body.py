"""Reads a request that brings weights: JSON that says where they are, or the tensors themselves as the body.

    application/json           {"source": {"kind": ...}, ...arguments}
    application/x-safetensors  a safetensors file; the arguments are in the query, `checksums` as JSON
    application/octet-stream   | length of the JSON u64, little-endian | JSON | tensors, to the end of the body |
                               JSON: {"format": "raw" (default), "safetensors", "sparse" or "pickle", "names", "dtypes",
                               "shapes", "offsets", "load_format", "index_dtype", ...arguments}

Tensors go to a file that the engine maps and removes. The arguments are checked before the first tensor is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.errors import InvalidRequest, RequestTooLarge
from headrace.processing.checks import refusal
from headrace.server.body import decode_object, parse_model
from headrace.server.context import context_of
from headrace.server.protocol.control import ApplyRefreshRequest, RefreshWeightsRequest
from headrace.server.protocol.sources import SOURCES, SentTensors, Source
from headrace.server.spool import IncomingBody

FRAME = "application/octet-stream"
SAFETENSORS = "application/x-safetensors"
LENGTH_BYTES = 8

Model = type[RefreshWeightsRequest] | type[ApplyRefreshRequest]


@dataclass(frozen=True, slots=True)
class WeightsBody:
    """The operation's arguments, and the file that the engine removes once it has started."""

    arguments: dict[str, Any]
    spooled: Path | None = None


async def read_weights(request: Request, model: Model) -> WeightsBody:
    """Raises InvalidRequest, RequestTooLarge or Unavailable; no file is left behind then."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == FRAME:
        return await _read_frame(request, model)
    if content_type == SAFETENSORS:
        return await _read_safetensors(request, model)
    body = parse_model(request, model, decode_object(await request.body()))
    source = _source(request, body.source)
    return WeightsBody({**body.arguments(), "source": source.arguments()})


async def _read_frame(request: Request, model: Model) -> WeightsBody:
    admission = context_of(request).config.admission
    incoming = IncomingBody(request, admission.max_refresh_bytes)
    length = int.from_bytes(await incoming.take(LENGTH_BYTES), "little")
    if length > admission.max_body_bytes:
        raise RequestTooLarge(f"The body's JSON may have at most {admission.max_body_bytes} bytes, not {length}.")
    data = decode_object(await incoming.take(length))
    layout = {name: data.pop(name) for name in SentTensors.model_fields if name in data}
    tensors = parse_model(request, SentTensors, layout)
    _check(request, tensors, "")
    return await _spooled(request, model, incoming, data, tensors.arguments())


async def _read_safetensors(request: Request, model: Model) -> WeightsBody:
    incoming = IncomingBody(request, context_of(request).config.admission.max_refresh_bytes)
    data: dict[str, Any] = dict(request.query_params)
    if "checksums" in data:
        try:
            data["checksums"] = msgspec.json.decode(data["checksums"])
        except (msgspec.MsgspecError, RecursionError):
            raise refusal("checksums", data["checksums"], "a JSON object") from None
    return await _spooled(request, model, incoming, data, {"format": "safetensors"}, is_text=True)


async def _spooled(  # budget: the parts of one body
    request: Request,
    model: Model,
    incoming: IncomingBody,
    data: dict[str, Any],
    tensors: dict[str, Any],
    *,
    is_text: bool = False,
) -> WeightsBody:
    if "source" in data:
        raise InvalidRequest("source has no place beside tensors: they are the body.", param="source")
    body = parse_model(request, model, {**data, "source": {}}, is_text=is_text)
    path = await incoming.spool(context_of(request))
    source = {"kind": "file", "file": str(path), "delete": True, **tensors}
    return WeightsBody({**body.arguments(), "source": source}, path)


def _source(request: Request, data: dict[str, Any]) -> Source:
    kind = data.get("kind")
    model = SOURCES.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise refusal("source.kind", kind, f"one of {', '.join(SOURCES)}")
    source = parse_model(request, model, data, prefix="source.")
    _check(request, source, "source.")
    return source


def _check(request: Request, source: Source | SentTensors, prefix: str) -> None:
    source.check(prefix)
    allows_pickles = context_of(request).config.engine.control.allow_pickled_weights
    if isinstance(source, SentTensors) and source.format == "pickle" and not allows_pickles:
        raise InvalidRequest(
            f"{prefix}format is pickle, which this server does not take (--allow-pickled-weights).",
            param=f"{prefix}format",
            code="pickles_refused",
        )
