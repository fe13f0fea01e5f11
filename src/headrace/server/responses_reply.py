"""The JSON of /v1/responses: the response, and the events of a stream whose last one holds it.

Items come in the order in which the model wrote them; of those of a stream one is open at a time. Text behind a call is
a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ErrorInfo
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.processing.tools import ToolCallDelta
from headrace.server.logprobs import chat_logprobs
from headrace.server.ordered import Text, Thoughts, in_order, parts_of
from headrace.server.protocol.responses import Message, ResponsesRequest
from headrace.server.response_store import ResponseStore
from headrace.server.shape import ChoiceParts, weight_version
from headrace.server.sse import encode
from headrace.types import FinishReason, SamplingParams, Usage

Item = dict[str, Any]
STATUS = {
    None: "in_progress",
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
LAST_EVENT = {"completed": "response.completed"}  # all others: response.incomplete, the only word for a part
REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """What a response says beside its output, and where it is kept."""

    id: str
    created: int
    model: str
    body: ResponsesRequest
    params: SamplingParams
    messages: Sequence[Message]  # the conversation without the instructions
    owner: bytes
    store: ResponseStore
    is_kept: bool


class ResponsesReply:
    """`Reply` of /v1/responses, which has one choice, and an `OpenResponse`."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._parts = ChoiceParts()
        self._sequence_number = 0
        self._open: str | None = None  # the type of the item that is not complete
        self._num_items = 0
        self._num_messages = self._num_calls = 0  # of them
        self._unsent: list[TokenLogprob] = []

    @property
    def owner(self) -> bytes:
        return self._shape.owner

    def snapshot(self) -> dict[str, Any]:
        return self._response(self._parts, None)

    # ------------------------------------------------------------------ the whole response

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> Any:
        return self._ended(choices[0], usage)

    def _ended(self, parts: ChoiceParts, usage: Usage) -> dict[str, Any]:
        """The response at its end, which is kept now."""
        shape, response = self._shape, self._response(parts, usage)
        if shape.is_kept:
            shape.store.put(shape.id, shape.owner, response, [*shape.messages, _own_message(parts)])
        shape.store.finish(shape.id)  # last: whoever asks finds it at any time
        return response

    def _response(self, parts: ChoiceParts, usage: Usage | None, error: dict[str, str] | None = None) -> dict[str, Any]:
        shape, body = self._shape, self._shape.body
        reason = parts.finish_reason
        reasoning = body.reasoning or {}
        return {
            "id": shape.id,
            "object": "response",
            "created_at": shape.created,
            "status": STATUS[reason] if error is None else "failed",
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if reason is FinishReason.LENGTH else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": shape.model,
            "output": self._items(parts),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": shape.is_kept,
            "temperature": shape.params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": shape.params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
            **weight_version([parts]),
            **parts.versions.members(),
        }

    def _items(self, parts: ChoiceParts) -> list[Item]:
        """All items so far. Only the last one can be incomplete."""
        items: list[Item] = []
        num_messages = num_calls = 0
        for part in parts_of(parts):
            if isinstance(part, Thoughts):
                items.append(self._reasoning([_thought(part.text)], "completed"))
            elif isinstance(part, Text):
                items.append(self._message(num_messages, [self._text(part.text, part.rows)], "completed"))
                num_messages += 1
            else:
                items.append(self._call(num_calls, part.id, part.name, "".join(part.arguments), "completed"))
                num_calls += 1
        status = STATUS[parts.finish_reason]
        if items:
            items[-1]["status"] = "incomplete" if status == "cancelled" else status
        return items

    def _reasoning(self, content: list[Item], status: str) -> Item:
        item = {"id": self._item_id("rs"), "type": REASONING, "summary": [], "content": content}
        return {**item, "encrypted_content": None, "status": status}

    def _message(self, number: int, content: list[Item], status: str) -> Item:
        item = {"id": self._message_id(number), "type": MESSAGE, "role": "assistant"}
        return {**item, "content": content, "status": status}

    def _text(self, text: str, rows: Sequence[TokenLogprob]) -> Item:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(rows)}

    def _call(self, number: int, call_id: str | None, name: str | None, arguments: str, status: str) -> Item:
        item = {"id": f"{self._item_id('fc')}_{number}", "type": CALL, "call_id": call_id, "name": name}
        return {**item, "arguments": arguments, "status": status}

    def _message_id(self, number: int) -> str:
        return self._item_id("msg") + (f"_{number}" if number else "")

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._shape.id.removeprefix('resp_')}"

    def _logprobs(self, rows: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        num_top = self._shape.params.logprobs
        content: list[dict[str, Any]] = [] if num_top is None else chat_logprobs(rows, num_top, False)["content"]
        return content

    # ------------------------------------------------------------------ a stream

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        events = []
        if not self._sequence_number:
            response = self.snapshot()
            events = [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]
        for delta in deltas:
            num_chars = self._parts.num_chars
            self._parts.add(delta)
            self._unsent.extend(delta.logprobs or ())
            if delta.reasoning:
                events += self._grow_thoughts(delta.reasoning)
            for part in in_order(delta, num_chars):
                events += self._grow_text(part) if isinstance(part, str) else self._grow_call(part)
            if delta.finish_reason is not None:
                events += self._close()
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        response = self._ended(self._parts, usage)
        return self._event(LAST_EVENT.get(response["status"], "response.incomplete"), response=response)

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        code = "rate_limit_exceeded" if info.status == 429 else "server_error"
        error = {"code": code, "message": info.message}
        self._shape.store.finish(self._shape.id)
        return self._event("response.failed", response=self._response(self._parts, usage, error))

    def _event(self, kind: str, **members: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._sequence_number, **members})
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _of_item(self, kind: str, item_id: str, **members: Any) -> bytes:
        """An event about the last item."""
        return self._event(kind, item_id=item_id, output_index=self._num_items - 1, **members)

    def _of_part(self, kind: str, item_id: str, **members: Any) -> bytes:
        """An event about its only part."""
        return self._of_item(kind, item_id, content_index=0, **members)

    def _begin(self, item: Item, part: Item | None = None) -> list[bytes]:
        events = self._close()
        self._open = item["type"]
        self._num_items += 1
        events.append(self._event("response.output_item.added", output_index=self._num_items - 1, item=item))
        if part is not None:
            events.append(self._of_part("response.content_part.added", item["id"], part=part))
        return events

    def _grow_thoughts(self, text: str) -> list[bytes]:
        begun = [] if self._open == REASONING else self._begin(self._reasoning([], "in_progress"), _thought(""))
        return [*begun, self._of_part("response.reasoning_text.delta", self._item_id("rs"), delta=text)]

    def _grow_text(self, text: str) -> list[bytes]:
        begun = []
        if self._open != MESSAGE:
            begun = self._begin(self._message(self._num_messages, [], "in_progress"), self._text("", []))
            self._num_messages += 1
        logprobs, self._unsent = self._logprobs(self._unsent), []
        item_id = self._message_id(self._num_messages - 1)
        return [*begun, self._of_part("response.output_text.delta", item_id, delta=text, logprobs=logprobs)]

    def _grow_call(self, call: ToolCallDelta) -> list[bytes]:
        events = []
        if call.id is not None:
            events = self._begin(self._call(self._num_calls, call.id, call.name, "", "in_progress"))
            self._num_calls += 1
        if call.arguments:
            item_id = f"{self._item_id('fc')}_{self._num_calls - 1}"
            events.append(self._of_item("response.function_call_arguments.delta", item_id, delta=call.arguments))
        return events

    def _close(self) -> list[bytes]:
        """Ends the item that is open."""
        if self._open is None:
            return []
        item = self._items(self._parts)[self._num_items - 1]
        if self._parts.finish_reason is None:
            item["status"] = "completed"  # for there is more
        return [
            *self._part_done(item),
            self._event("response.output_item.done", output_index=self._num_items - 1, item=item),
        ]

    def _part_done(self, item: Item) -> list[bytes]:
        kind, self._open = self._open, None
        if kind == CALL:
            more = {"arguments": item["arguments"], "name": item["name"]}
            return [self._of_item("response.function_call_arguments.done", item["id"], **more)]
        (part,) = item["content"]
        if kind == MESSAGE:
            more = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._of_part("response.output_text.done", item["id"], **more)
        else:
            done = self._of_part("response.reasoning_text.done", item["id"], text=part["text"])
        return [done, self._of_part("response.content_part.done", item["id"], part=part)]


def _thought(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def _own_message(parts: ChoiceParts) -> Message:
    """The answer as the next response's conversation has it."""
    message: Message = {"role": "assistant", "content": "".join(parts.text)}
    if parts.reasoning:
        message["reasoning_content"] = "".join(parts.reasoning)
    if parts.calls:
        message["tool_calls"] = [call.members() for call in parts.calls]
    return message


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
