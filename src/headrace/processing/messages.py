"""Checks chat messages before a template sees them. Called by `inputs.py`; how a template reads them is
`chat_template.py`'s.

Media parts are refused by name, roles are labels, and `developer` is called `system`: no template of the supported
families knows the newer word. Everything else of a message passes unchanged.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.processing.checks import check_name, refusal, shown

MEDIA_PARTS = frozenset({"image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "video", "file"})


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages in the order given; copies where a role is renamed."""
    if not isinstance(messages, list | tuple) or not messages:
        raise refusal("messages", messages, "a non-empty list of messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refusal(path, message, "an object with role and content")
    role = check_name(message.get("role"), f"{path}.role", max_chars=64)
    content = message.get("content")
    if content is None and role != "assistant":
        raise refusal(f"{path}.content", None, "a string or a list of content parts")
    if isinstance(content, list | tuple):
        for index, part in enumerate(content):
            _refuse_media(part, f"{path}.content[{index}]")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not isinstance(tool_calls, list | tuple):
        raise refusal(f"{path}.tool_calls", tool_calls, "a list of tool calls")
    for index, call in enumerate(tool_calls or ()):
        check_named_function(call, f"{path}.tool_calls[{index}]")
    return {**message, "role": "system"} if role == "developer" else message


def check_named_function(value: Any, path: str) -> None:
    """A tool or a call of one: in OpenAI's shape, or in that of templates, which have no `function` around it."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{path} must have a function with a name, not {shown(value)}.", param=path)


def _refuse_media(part: Any, path: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise InvalidRequest(
            f"{path} is of type {kind}, but the served model reads text alone; only parts of type text are allowed.",
            param=path,
            code="unsupported_field",
        )
