"""The JSON of /v1/responses: the response, and the events of a stream whose last one holds it.

Items come in one order, thoughts, message, calls, and a call comes whole, when everything else is there: the parsers do
not say where in the text a call stood, and a response must not depend on how the tokens were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ErrorInfo
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.server.logprobs import chat_logprobs
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
REASONING, MESSAGE = "reasoning", "message"


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
        shape.store.finish(shape.id)
        if shape.is_kept:
            shape.store.put(shape.id, shape.owner, response, [*shape.messages, _own_message(parts)])
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
            "text": {"format": {"type": "text"}},
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
        if thoughts := "".join(parts.reasoning):
            items.append(self._reasoning([_thought(thoughts)], "completed"))
        if text := "".join(parts.text):
            items.append(self._message([self._text(text, parts.logprobs)], "completed"))
        for number, call in enumerate(parts.calls):
            items.append(self._call(number, call.id, call.name, "".join(call.arguments), "completed"))
        status = STATUS[parts.finish_reason]
        if items:
            items[-1]["status"] = "incomplete" if status == "cancelled" else status
        return items

    def _reasoning(self, content: list[Item], status: str) -> Item:
        item = {"id": self._item_id("rs"), "type": REASONING, "summary": [], "content": content}
        return {**item, "encrypted_content": None, "status": status}

    def _message(self, content: list[Item], status: str) -> Item:
        item = {"id": self._item_id("msg"), "type": MESSAGE, "role": "assistant"}
        return {**item, "content": content, "status": status}

    def _text(self, text: str, rows: Sequence[TokenLogprob]) -> Item:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(rows)}

    def _call(self, number: int, call_id: str | None, name: str | None, arguments: str, status: str) -> Item:
        item = {"id": f"{self._item_id('fc')}_{number}", "type": "function_call", "call_id": call_id, "name": name}
        return {**item, "arguments": arguments, "status": status}

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
            self._parts.add(delta)
            self._unsent.extend(delta.logprobs or ())
            if delta.reasoning:
                events += self._grow_thoughts(delta.reasoning)
            if delta.text:
                events += self._grow_text(delta.text)
            if delta.finish_reason is not None:
                events += self._finish()
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

    def _of_part(self, kind: str, item_id: str, **members: Any) -> bytes:
        """An event about the only part of the last item."""
        return self._event(kind, item_id=item_id, output_index=self._num_items - 1, content_index=0, **members)

    def _begin(self, item: Item, part: Item) -> list[bytes]:
        events = self._close()
        self._open = item["type"]
        self._num_items += 1
        return [
            *events,
            self._event("response.output_item.added", output_index=self._num_items - 1, item=item),
            self._of_part("response.content_part.added", item["id"], part=part),
        ]

    def _grow_thoughts(self, text: str) -> list[bytes]:
        begun = [] if self._open == REASONING else self._begin(self._reasoning([], "in_progress"), _thought(""))
        return [*begun, self._of_part("response.reasoning_text.delta", self._item_id("rs"), delta=text)]

    def _grow_text(self, text: str) -> list[bytes]:
        begun = [] if self._open == MESSAGE else self._begin(self._message([], "in_progress"), self._text("", []))
        logprobs, self._unsent = self._logprobs(self._unsent), []
        kind = "response.output_text.delta"
        return [*begun, self._of_part(kind, self._item_id("msg"), delta=text, logprobs=logprobs)]

    def _close(self) -> list[bytes]:
        """Ends the item that is open."""
        if self._open is None:
            return []
        item = self._items(self._parts)[self._num_items - 1]
        if self._open == REASONING and self._parts.finish_reason is None:
            item["status"] = "completed"  # for there is more
        self._open = None
        (part,) = item["content"]
        if part["type"] == "output_text":
            more = {"text": part["text"], "logprobs": part["logprobs"]}
            done = self._of_part("response.output_text.done", item["id"], **more)
        else:
            done = self._of_part("response.reasoning_text.done", item["id"], text=part["text"])
        return [done, self._of_part("response.content_part.done", item["id"], part=part), self._item_done(item)]

    def _item_done(self, item: Item) -> bytes:
        return self._event("response.output_item.done", output_index=self._num_items - 1, item=item)

    def _finish(self) -> list[bytes]:
        """The calls, when all else is there."""
        events = self._close()
        for item in self._items(self._parts)[self._num_items :]:
            self._num_items += 1
            at = {"item_id": item["id"], "output_index": self._num_items - 1}
            begun = {**item, "arguments": "", "status": "in_progress"}
            events += [
                self._event("response.output_item.added", output_index=self._num_items - 1, item=begun),
                self._event("response.function_call_arguments.delta", **at, delta=item["arguments"]),
                self._event(
                    "response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"]
                ),
                self._item_done(item),
            ]
        return events


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
