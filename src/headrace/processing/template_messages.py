"""Messages as a chat template reads them, and the mark that tells where the message to continue ends.

Used by `chat_template.py` alone. The rules are transformers': keys without a value are left out, reasoning goes under
all the names that templates know. Tool-call arguments are objects that may stand for their own text. Content is a
string or a list of parts, as the template wants it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class Arguments(dict[str, Any]):
    """Arguments of a tool call. Most templates read an object, DeepSeek's join a text: it is both."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], *, wants_parts: bool, wants_null: bool = False
) -> list[dict[str, Any]]:
    """Copies that a template may read: the caller's messages are never changed. Raises InvalidRequest.

    `wants_null`: the template asks whether content is none, to tell calls from answers.
    """
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed.", param="messages")
    ready = [_message(message, f"messages[{index}]", wants_parts) for index, message in enumerate(messages)]
    for message in ready:
        if message.get("tool_calls") and "content" not in message:
            message["content"] = None if wants_null else [] if wants_parts else ""
    return ready


def _message(message: Mapping[str, Any], path: str, wants_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} is {message!r:.80}; an object with role and content is needed.", param=path)
    ready = {key: value for key, value in message.items() if value is not None}
    reasoning = next((ready[name] for name in REASONING_FIELDS if name in ready), None)
    if reasoning is not None:
        ready = {"thinking": reasoning, **ready, "reasoning_content": reasoning}
    if "content" in ready:
        ready["content"] = _content(ready["content"], f"{path}.content", wants_parts)
    if isinstance(calls := ready.get("tool_calls"), list | tuple):
        ready["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
        if not calls:  # templates take the key alone for calls
            del ready["tool_calls"]
    return ready


def _content(content: Any, path: str, wants_parts: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{path} is {content!r:.80}; a string or a list of parts is needed.", param=path)
    texts = [_text_of(part, f"{path}[{index}]") for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if wants_parts else "\n".join(texts)


def _text_of(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{path} has type {kind!r:.40}; only parts with text are allowed.", param=path)
    return text


def _tool_call(call: Any, path: str) -> Any:
    """The call with its arguments as an object: clients send them as a string of JSON, or none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = "{}"
    if not isinstance(arguments, str):
        return call
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{path}.function.arguments is not valid JSON: {arguments!r:.80}", param=f"{path}.function.arguments"
        ) from None
    if isinstance(decoded, dict):
        decoded = Arguments(decoded, arguments)
    return {**call, "function": {**function, "arguments": decoded}}


def tag_final_message(chat: list[dict[str, Any]]) -> str:
    """Marks the end of the last message, in place, and returns its text."""
    content = chat[-1].get("content")
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + TAG
        return text
    if not isinstance(content, str) or (not content and "tool_calls" in chat[-1]):
        raise InvalidRequest(
            "continue_final_message needs a last message with content to continue.", param="continue_final_message"
        )
    chat[-1]["content"] = content + TAG
    return content


def untag(rendered: str, final: str) -> str:
    """The rendered text up to the end of the last message."""
    mark = rendered.rfind(TAG.strip())
    if mark < 0 or final.strip() not in rendered:
        raise InvalidRequest(
            "continue_final_message: the chat template leaves the last message out or changes it.",
            param="continue_final_message",
        )
    kept = rendered[:mark]
    # Where the template trimmed the message, it trimmed the mark's own last space too.
    return kept if rendered.startswith(TAG, mark) else kept.rstrip()
