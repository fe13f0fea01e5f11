"""The JSON of /v1/messages: the message, and the events of a stream that add up to it.

Blocks come in the order in which the model wrote them; of those of a stream one is open at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from headrace.errors import ErrorInfo, Unavailable
from headrace.processing.outputs import TextDelta
from headrace.processing.tools import ToolCallDelta
from headrace.server.call_input import CallInput, whole_input
from headrace.server.errors import error_object, error_response, json_response
from headrace.server.ordered import Text, Thoughts, in_order, parts_of
from headrace.server.shape import CallParts, ChoiceParts, weight_version
from headrace.server.sse import encode
from headrace.types import FinishReason, Usage

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TOOL_USE = "tool_use"


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """Anthropic's shape, with our `param` and `code` beside."""
    error = error_object(info)["error"]
    return {"type": "error", "error": {**error, "type": ERROR_TYPES.get(info.status, "api_error")}}


def error_reply(info: ErrorInfo) -> Response:
    headers = error_response(info).headers
    response = json_response(error_body(info), info.status)
    for name in ("Retry-After", "WWW-Authenticate"):
        if name in headers:
            response.headers[name] = headers[name]
    return response


class MessagesReply:
    """`Reply` of /v1/messages, which has one choice."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._so_far = ChoiceParts()
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that is not complete
        self._input = CallInput()  # of the last call
        self._has_begun = False

    # ------------------------------------------------------------------ the whole reply

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> Any:
        (parts,) = choices
        message = self._message([_block(part) for part in parts_of(parts)], usage) | _end_members(parts)
        return {**message, **weight_version(choices), **parts.versions.members()}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    # ------------------------------------------------------------------ a stream

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        events = [] if self._has_begun else [self._begin(usage)]
        for delta in deltas:
            num_chars = self._so_far.num_chars
            self._so_far.add(delta)
            if delta.reasoning:
                events += self._grow("thinking", "thinking_delta", delta.reasoning, signature="")
            for part in in_order(delta, num_chars):
                if isinstance(part, str):
                    events += self._grow("text", "text_delta", part)
                else:
                    events += self._grow_call(part)
            if delta.finish_reason is not None:
                events += self._finish(usage)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        return _event("message_stop")

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode(error_body(info))

    def _begin(self, usage: Usage) -> bytes:
        self._has_begun = True
        start = msgspec.structs.replace(usage, completion_tokens=0)
        return _event("message_start", message=self._message([], start)) + _event("ping")

    def _grow(self, kind: str, delta_type: str, text: str, **more: Any) -> list[bytes]:
        """More of a block, which is begun if it is not open."""
        events = []
        if self._open != kind:
            events += [*self._close(), self._start({"type": kind, kind: "", **more})]
            self._open = kind
        events.append(self._delta({"type": delta_type, kind: text}))
        return events

    def _grow_call(self, call: ToolCallDelta) -> list[bytes]:
        events = []
        if call.id is not None:
            events = [*self._close(), self._start(_call_block(call.id, call.name, {}))]
            self._open, self._input = TOOL_USE, CallInput()
        return events + self._input_delta(self._input.feed(call.arguments))

    def _input_delta(self, text: str) -> list[bytes]:
        return [self._delta({"type": "input_json_delta", "partial_json": text})] if text else []

    def _start(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        rest = self._input_delta(self._input.finish()) if self._open == TOOL_USE else []
        self._open = None
        return [*rest, _event("content_block_stop", index=self._num_blocks - 1)]

    def _finish(self, usage: Usage) -> list[bytes]:
        events = self._close()
        more = weight_version([self._so_far]) | self._so_far.versions.members()
        return [*events, _event("message_delta", delta=_end_members(self._so_far), usage=_usage(usage), **more)]


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **members}))


def _end_members(parts: ChoiceParts) -> dict[str, Any]:
    """Anthropic has no word for what a control operation has ended: it is an error."""
    reason, matched = parts.finish_reason, parts.stop_reason
    if reason is FinishReason.ABORT:
        raise Unavailable("The request was ended by a control operation.", code="aborted")
    if reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": TOOL_USE if parts.has_calls else "end_turn", "stop_sequence": None}


def _block(part: Thoughts | Text | CallParts) -> dict[str, Any]:
    if isinstance(part, Thoughts):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return _call_block(part.id, part.name, msgspec.Raw(whole_input("".join(part.arguments)).encode()))


def _call_block(call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    return {"type": TOOL_USE, "id": call_id, "name": name, "input": arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Cached tokens are counted apart from the other ones of the prompt, as at Anthropic."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
