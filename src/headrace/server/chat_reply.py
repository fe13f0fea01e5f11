"""The JSON of /v1/chat/completions: the whole reply, and the chunks of a stream, from the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import ErrorInfo
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.server.logprobs import chat_logprobs, prompt_logprobs
from headrace.server.shape import ChoiceParts, PromptRows, ReplyShape, has_text_alone, usage_object, weight_version
from headrace.server.sse import FINISH, FrameWriter, TextFrames, encode, error_end, version_json
from headrace.types import FinishReason, Usage

ROLE_DELTA = b'{"role":"assistant","content":""}'
TOOL_CALLS = "tool_calls"
TEXT_END = b'},"logprobs":null,"finish_reason":null}'


class ChatReply:
    """`Reply` of the chat route. Chunks of a choice: role, pieces of the message, finish with an empty delta."""

    def __init__(self, shape: ReplyShape, *, has_reasoning: bool = False) -> None:
        """`has_reasoning`: thoughts are looked for, so that a message says so when it has none."""
        self._has_reasoning = has_reasoning
        self._shape = shape
        self._writer = FrameWriter(shape, "chat.completion.chunk")
        self._unsent: dict[int, ChoiceParts] = {}
        self._prompt_rows = PromptRows(shape.n)
        self._has_sent_prompt = False
        self._texts: dict[int, TextFrames | None] = {}
        self._echo = shape.echo_texts[0] if shape.echo_texts else ""

    # ------------------------------------------------------------------ the whole reply

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> dict[str, Any]:
        shape = self._shape
        body: dict[str, Any] = {
            "id": shape.id,
            "object": "chat.completion",
            "created": shape.created,
            "model": shape.model,
            "choices": [self._whole_choice(index, parts) for index, parts in enumerate(choices)],
            "usage": usage_object(usage),
            **weight_version(choices),
        }
        rows = max((parts.prompt_logprobs for parts in choices), key=len, default=[])
        return body | self._of_prompt(rows)

    def _whole_choice(self, index: int, parts: ChoiceParts) -> dict[str, Any]:
        assert parts.finish_reason is not None, "every choice ends once"
        choice: dict[str, Any] = {
            "index": index,
            "message": self._message(parts),
            "logprobs": self._logprobs(parts.logprobs),
            "finish_reason": TOOL_CALLS if _ends_with_calls(parts) else parts.finish_reason.label,
            "stop_reason": parts.stop_reason,
        }
        if self._shape.return_token_ids:
            choice["token_ids"] = parts.token_ids
        return choice | parts.versions.members()

    def _message(self, parts: ChoiceParts) -> dict[str, Any]:
        content = self._echo + "".join(parts.text)
        reasoning = "".join(parts.reasoning)
        has_other = bool(reasoning or parts.calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if has_other and not content else content,
            "refusal": None,
        }
        if self._has_reasoning:
            message |= _reasoning_members(reasoning or None)
        if parts.calls:
            message["tool_calls"] = [call.members() for call in parts.calls]
        return message

    # ------------------------------------------------------------------ a stream

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        return b"".join([self._choice_frames(delta, usage) for delta in deltas])

    def end(self, usage: Usage) -> bytes:
        return self._writer.end(usage)

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        return error_end(info)

    def _choice_frames(self, delta: TextDelta, usage: Usage) -> bytes:
        index = delta.choice
        texts = self._texts.get(index)
        if texts is not None and has_text_alone(delta):
            return texts.frame(delta)
        unsent = self._unsent.get(index)
        frames = []
        if unsent is None:
            unsent = self._unsent[index] = ChoiceParts()
            unsent.add(delta)
            frames.append(self._first_frames(index, usage))
        else:
            unsent.add(delta)
        if delta.prompt_logprobs:
            self._prompt_rows.of(0, unsent.prompt_logprobs)  # another choice may be the first with text
        if unsent.text or unsent.reasoning or unsent.calls:
            frames.append(self._content_frame(index, unsent, usage))
            unsent.drop_sent()
            before = b'{"index":%d,"delta":{"content":' % index
            self._texts[index] = self._writer.text_frames(unsent.versions, before, TEXT_END)
        if unsent.finish_reason is not None:
            frames.append(self._finish_frame(index, unsent, usage))
        return b"".join(frames)

    def _first_frames(self, index: int, usage: Usage) -> bytes:
        role = self._writer.frame(
            b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, ROLE_DELTA), usage
        )
        if not self._echo:
            return role
        echo = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, encode(self._echo))
        return role + self._writer.frame(echo, usage)

    def _content_frame(self, index: int, unsent: ChoiceParts, usage: Usage) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (
            index,
            _delta_json(unsent),
            self._logprobs_json(unsent.logprobs),
            self._token_ids_json(unsent.token_ids),
        )
        return self._writer.frame(choice, usage, self._prompt_json(unsent))

    def _finish_frame(self, index: int, unsent: ChoiceParts, usage: Usage) -> bytes:
        spans = unsent.versions.members()
        choice = b'{"index":%d,"delta":{},"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            index,
            self._logprobs_json(unsent.logprobs),
            b'"tool_calls"' if _ends_with_calls(unsent) else FINISH[unsent.finish_reason],
            encode(unsent.stop_reason),
            self._token_ids_json(unsent.token_ids) + (b"," + encode(spans)[1:-1] if spans else b""),
        )
        return self._writer.frame(choice, usage, self._prompt_json(unsent) + version_json(unsent))

    # ------------------------------------------------------------------ parts of both

    def _logprobs(self, rows: list[TokenLogprob]) -> dict[str, Any] | None:
        num_top = self._shape.num_top
        return None if num_top is None else chat_logprobs(rows, num_top, self._shape.as_ids)

    def _logprobs_json(self, rows: list[TokenLogprob]) -> bytes:
        return encode(self._logprobs(rows)) if rows else b"null"

    def _token_ids_json(self, token_ids: list[int]) -> bytes:
        return b',"token_ids":' + encode(token_ids) if self._shape.return_token_ids else b""

    def _of_prompt(self, rows: list[TokenLogprob]) -> dict[str, Any]:
        """Members beside `choices` that speak of the prompt, when they were asked for."""
        shape = self._shape
        members: dict[str, Any] = {}
        if shape.wants_prompt_logprobs:
            members["prompt_logprobs"] = prompt_logprobs(rows, shape.as_ids)
        if shape.return_token_ids:
            members["prompt_token_ids"] = shape.prompts[0]
        return members

    def _prompt_json(self, unsent: ChoiceParts) -> bytes:
        """The same, once in a stream."""
        if self._has_sent_prompt:
            return b""
        self._has_sent_prompt = True
        members = self._of_prompt(self._prompt_rows.of(0, unsent.prompt_logprobs))
        return b"," + encode(members)[1:-1] if members else b""


def _ends_with_calls(parts: ChoiceParts) -> bool:
    """A choice that was cut off says so, whatever it called before."""
    return parts.has_calls and parts.finish_reason is FinishReason.STOP


def _delta_json(parts: ChoiceParts) -> bytes:
    if not parts.reasoning and not parts.calls:
        return b'{"content":%b}' % encode("".join(parts.text))
    delta: dict[str, Any] = {}
    if parts.reasoning:
        delta |= _reasoning_members("".join(parts.reasoning))
    if parts.text:
        delta["content"] = "".join(parts.text)
    if parts.calls:
        delta["tool_calls"] = [{"index": call.index, **call.members()} for call in parts.calls]
    return encode(delta)


def _reasoning_members(reasoning: str | None) -> dict[str, Any]:
    """Under its first name and under the one that vLLM has moved to."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}
