"""Content blocks of /v1/messages and /v1/responses as the parts of chat messages. Only text can be served."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_text, refusal


def text_parts(value: Any, path: str, kinds: Collection[str]) -> str | list[dict[str, Any]]:
    """A string as it is; blocks whose type is one of `kinds`, as text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal(path, value, "a string or a list of blocks")
    return [text_part(block, f"{path}[{index}]", kinds) for index, block in enumerate(value)]


def text_part(block: Any, path: str, kinds: Collection[str]) -> dict[str, Any]:
    kind = block_type(block, path)
    if kind not in kinds:
        raise unsupported_block(kind, path)
    return {"type": "text", "text": check_text(block.get("text"), f"{path}.text", allow_empty=True)}


def block_type(block: Any, path: str) -> str:
    if not isinstance(block, dict):
        raise refusal(path, block, "an object with a type")
    return check_text(block.get("type"), f"{path}.type")


def unsupported_block(kind: str, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is of type {kind[:40]!a}, which is not served: the model reads text, tool calls and their results.",
        param=path,
        code="unsupported_field",
    )


def joined(parts: str | list[dict[str, Any]]) -> str:
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as chat messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat requests have it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
