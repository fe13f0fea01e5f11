"""A conversation in the chat form, in which responses are kept, as the items of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.server.protocol.content import joined
from headrace.server.protocol.responses import Message

Item = dict[str, Any]


def input_items(messages: Sequence[Message], response_id: str) -> list[Item]:
    """All of them, the oldest first. Ids follow from their places."""
    unique = response_id.removeprefix("resp_")
    items = [item for message in messages for item in _items(message)]
    prefixes = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return [
        {"id": f"{prefixes.get(item['type'], 'msg')}_{unique}_in{number}", **item} for number, item in enumerate(items)
    ]


def _items(message: Message) -> Iterator[Item]:
    done = {"status": "completed"}
    content = message.get("content")
    text = "" if content is None else joined(content)
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text, **done}
        return
    if thoughts := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thoughts}
        yield {"type": "reasoning", "summary": [], "content": [part], **done}
    if text or message["role"] != "assistant":
        is_own = message["role"] == "assistant"
        part = (
            {"type": "output_text", "text": text, "annotations": []} if is_own else {"type": "input_text", "text": text}
        )
        yield {"type": "message", "role": message["role"], "content": [part], **done}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        call_id, name, arguments = call["id"], function["name"], function["arguments"]
        yield {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **done}
