"""The JSON of /v1/completions: the whole reply, and the chunks of a stream, from the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import ErrorInfo
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.processing.tokenizer import Tokenizer
from headrace.server.logprobs import CompletionLogprobs, prompt_logprobs
from headrace.server.shape import ChoiceParts, PromptRows, ReplyShape, has_text_alone, usage_object, weight_version
from headrace.server.sse import FINISH, FrameWriter, TextFrames, encode, error_end, version_json
from headrace.types import Usage

TEXT_END = b',"logprobs":null,"finish_reason":null}'


class CompletionReply:
    """`Reply` of the completions route. Chunks of a choice: the prompt (echo), pieces of text, an empty one last."""

    def __init__(self, shape: ReplyShape, tokenizer: Tokenizer, num_prompt_top: int | None) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._num_prompt_top = num_prompt_top  # set when the sender asked for prompt_logprobs itself
        self._writer = FrameWriter(shape, "text_completion")
        self._unsent: dict[int, ChoiceParts] = {}
        self._columns: dict[int, CompletionLogprobs] = {}
        self._prompt_rows = PromptRows(shape.n)
        self._started: set[int] = set()
        self._texts: dict[int, TextFrames | None] = {}

    # ------------------------------------------------------------------ the whole reply

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> dict[str, Any]:
        shape = self._shape
        for index, parts in enumerate(choices):
            self._prompt_rows.of(index, parts.prompt_logprobs)
        return {
            "id": shape.id,
            "object": "text_completion",
            "created": shape.created,
            "model": shape.model,
            "choices": [self._whole_choice(index, parts) for index, parts in enumerate(choices)],
            "usage": usage_object(usage),
            **weight_version(choices),
        }

    def _whole_choice(self, index: int, parts: ChoiceParts) -> dict[str, Any]:
        assert parts.finish_reason is not None, "every choice ends once"
        rows = self._prompt_rows.of(index, parts.prompt_logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(index) + "".join(parts.text),
            "logprobs": self._logprobs(index, rows, parts.logprobs, is_first=True),
            "finish_reason": parts.finish_reason.label,
            "stop_reason": parts.stop_reason,
        }
        return choice | self._of_prompt(index, rows) | self._of_tokens(parts.token_ids) | parts.versions.members()

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
        unsent = self._unsent.setdefault(index, ChoiceParts())
        unsent.add(delta)
        if delta.prompt_logprobs:
            self._prompt_rows.of(index, unsent.prompt_logprobs)  # another choice may be the first with text
        if not unsent.token_ids and not unsent.text and unsent.finish_reason is None:
            return b""  # rows of the prompt alone: they wait for the first token
        is_first = index not in self._started
        frames = []
        if unsent.text or (is_first and self._shape.echo_texts):
            frames.append(self._text_frame(index, unsent, usage, is_first))
            is_first = False
            self._started.add(index)
            before = b'{"index":%d,"text":' % index
            self._texts[index] = self._writer.text_frames(unsent.versions, before, TEXT_END)
            unsent.drop_sent()
        if unsent.finish_reason is not None:
            frames.append(self._text_frame(index, unsent, usage, is_first, is_last=True))
        return b"".join(frames)

    def _text_frame(
        self, index: int, unsent: ChoiceParts, usage: Usage, is_first: bool, *, is_last: bool = False
    ) -> bytes:
        rows = self._prompt_rows.of(index, unsent.prompt_logprobs) if is_first else []
        text = (self._echo(index) if is_first else "") + "".join(unsent.text)
        has_rows = bool(unsent.logprobs) or (is_first and bool(self._shape.echo_texts))
        logprobs = self._logprobs(index, rows, unsent.logprobs, is_first=is_first) if has_rows else None
        more = (self._of_prompt(index, rows) if is_first else {}) | self._of_tokens(unsent.token_ids)
        if is_last:
            more |= {"stop_reason": unsent.stop_reason, **unsent.versions.members()}
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index,
            encode(text),
            encode(logprobs),
            FINISH[unsent.finish_reason] if is_last else b"null",
            b"," + encode(more)[1:-1] if more else b"",
        )
        return self._writer.frame(choice, usage, version_json(unsent) if is_last else b"")

    # ------------------------------------------------------------------ parts of both

    def _echo(self, index: int) -> str:
        return self._shape.echo_texts[index // self._shape.n] if self._shape.echo_texts else ""

    def _logprobs(
        self, index: int, prompt_rows: list[TokenLogprob], rows: list[TokenLogprob], *, is_first: bool
    ) -> dict[str, Any] | None:
        shape = self._shape
        if shape.num_top is None:
            return None
        columns = self._columns.get(index)
        if columns is None:
            columns = self._columns[index] = CompletionLogprobs(shape.num_top, shape.as_ids)
        if not (is_first and shape.echo_texts):
            return columns.columns(rows)
        first_id = shape.prompts[index // shape.n][0]
        return columns.columns([*prompt_rows, *rows], first=(first_id, self._tokenizer.token_text(first_id)))

    def _of_prompt(self, index: int, rows: list[TokenLogprob]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        if self._num_prompt_top is not None:
            members["prompt_logprobs"] = prompt_logprobs(rows, self._shape.as_ids, self._num_prompt_top)
        if self._shape.return_token_ids:
            members["prompt_token_ids"] = self._shape.prompts[index // self._shape.n]
        return members

    def _of_tokens(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._shape.return_token_ids else {}
