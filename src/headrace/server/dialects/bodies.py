"""What several dialects send in the same form: process groups, tensor lists, pickles, tags, loose numbers and flags.

Bodies are read by `server/body.py`; a control route takes one that is missing or has unknown fields. Here are the
fields that mean the same everywhere, and how they become arguments of the engine's operations.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import Field
from starlette.requests import Request

from headrace.errors import InvalidRequest
from headrace.processing.checks import MAX_SHOWN, refusal
from headrace.server.body import read_body
from headrace.server.context import ServerContext, context_of, request_state
from headrace.server.protocol.common import RequestModel
from headrace.server.spool import remove, spool_bytes

DEFAULT_GROUP = "weight_update_group"
NUM_RANKS = 1  # processes of the engine that a trainer's group must count
Model = TypeVar("Model", bound=RequestModel)
BASE64_PIECE = 4 << 20  # characters decoded at once: a multiple of 4, and short enough not to be felt elsewhere


class GroupFields(RequestModel):
    """Where to meet a trainer."""

    master_address: str
    master_port: int | str = Field(description="AReaL sends a string.")
    rank_offset: int = 1
    world_size: int
    group_name: str | None = None
    backend: str | None = None

    def arguments(self, default_group: str = DEFAULT_GROUP) -> dict[str, Any]:
        """Of the operation join_group."""
        arguments = {
            "host": self.master_address,
            "port": as_int(self.master_port, "master_port"),
            "rank_offset": self.rank_offset,
            "world_size": self.world_size,
            "group_name": self.group_name or default_group,
        }
        return arguments if self.backend is None else {**arguments, "backend": self.backend}


class GroupName(RequestModel):
    group_name: str | None = None


class Nothing(RequestModel):
    """No field that matters."""


def group_source(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str | None = None,
    form: str | None = None,
) -> dict[str, Any]:
    return {
        "kind": "group",
        "group_name": group_name or DEFAULT_GROUP,
        "names": list(names),
        "dtypes": [dtype.removeprefix("torch.") for dtype in dtypes],
        "shapes": [list(shape) for shape in shapes],
        "load_format": form,
    }


def drop_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


async def read_tensor_body(request: Request, model: type[Model]) -> Model:
    """A body whose JSON may hold tensors: up to --max-refresh-bytes, in memory."""
    request_state(request)["max_body_bytes"] = context_of(request).config.admission.max_refresh_bytes
    return await read_body(request, model, allow_empty=True)


@asynccontextmanager
async def pickled_source(
    context: ServerContext, serialized: str | list[str], load_format: str | None
) -> AsyncIterator[dict[str, Any]]:
    """`serialized_named_tensors` as a source: base64 of a pickle, or one per rank, of which this engine reads its own.

    The bytes lie in a file, which is gone at the end of the block.
    """
    if not context.config.engine.control.allow_pickled_weights:
        raise InvalidRequest(
            "serialized_named_tensors holds pickles, which are refused unless the server runs with "
            "--allow-pickled-weights; a folder or a process group needs none.",
            param="serialized_named_tensors",
            code="pickles_refused",
        )
    payloads = [serialized] if isinstance(serialized, str) else serialized
    if not payloads:
        raise InvalidRequest("serialized_named_tensors is empty.", param="serialized_named_tensors")
    data = await asyncio.to_thread(_decode_base64, payloads[0])
    path = await spool_bytes(context, data)
    del data
    try:
        yield {"kind": "file", "file": str(path), "format": "pickle", "delete": True, "load_format": load_format}
    finally:
        await remove(path)


def _decode_base64(text: str) -> bytes:
    """In pieces, so that the event loop gets its turn between them."""
    try:
        data = text.encode("ascii")
        pieces = range(0, len(data), BASE64_PIECE)
        return b"".join(binascii.a2b_base64(data[at : at + BASE64_PIECE], strict_mode=True) for at in pieces)
    except ValueError as error:  # binascii.Error, or a character that is not ASCII
        message = f"serialized_named_tensors is no base64: {str(error)[:MAX_SHOWN]}."
        raise InvalidRequest(message, param="serialized_named_tensors") from None


def as_int(value: int | str, param: str) -> int:
    """Some trainers send numbers as strings."""
    try:
        return int(value)
    except ValueError:
        raise refusal(param, value, "a whole number") from None


def as_text(value: int | str | None) -> str | None:
    """A version, which some trainers count with integers."""
    return None if value is None else str(value)


def query_flag(request: Request, name: str, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise refusal(name, value, "true or false")
    return value.lower() in ("true", "1")


def query_tags(request: Request) -> list[str] | None:
    """`?tags=a&tags=b`, `?tags=a,b` and `?tags=["a"]` are all in use; None: no tag at all."""
    return split_tags(request.query_params.getlist("tags"))


def split_tags(values: Iterable[str]) -> list[str] | None:
    """FastDeploy says `weight`."""
    words = [word.strip(" []\"'") for value in values for word in value.split(",")]
    return ["weights" if word == "weight" else word for word in words if word] or None
