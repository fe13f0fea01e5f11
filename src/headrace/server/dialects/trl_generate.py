"""TRL's `/generate/` and `/chat/`: many prompts or conversations in, token ids and logprobs out, never streamed.

`generate.py` has the path that /generate shares with SGLang. Completions come prompt by prompt, `n` of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from headrace.errors import ErrorInfo
from headrace.processing.checks import refusal
from headrace.processing.inputs import ChatInput, Prompt, RequestOptions
from headrace.processing.logprobs import TokenLogprob, TopLogprob
from headrace.processing.outputs import TextDelta
from headrace.server.body import decode_object, keep_request_id, parse_model
from headrace.server.context import context_of
from headrace.server.generation import Job, answer
from headrace.server.keys import require_user
from headrace.server.protocol.common import STRINGS, UNSUPPORTED_EVERYWHERE, GenerationRequest
from headrace.server.routes.options import constrained, with_grammar
from headrace.server.shape import ChoiceParts
from headrace.server.sse import error_end
from headrace.types import Usage

router = APIRouter(dependencies=[Depends(require_user)], include_in_schema=False)

DEFAULT_MAX_TOKENS = 16
KWARGS = "generation_kwargs"
REGEX_FIELDS = ("guided_decoding_regex", "structured_outputs_regex")
_TEXT_ONLY = "the served model reads text alone."


class TrlRequest(GenerationRequest):
    """What both routes have beside their prompts."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED_EVERYWHERE,
        "images": _TEXT_ONLY,
        "stream": "the reply comes whole.",
    }

    logprobs: int | None = Field(0, description="Of each token and the N most likely; null: none.")
    structured_outputs_regex: str | None = Field(None, description="As guided_regex.")
    guided_decoding_regex: str | None = Field(None, description="The older name.")
    generation_kwargs: dict[str, Any] | None = Field(None, description="Further sampling fields; they win.")


class GenerateBody(TrlRequest):
    prompts: Annotated[Any, WithJsonSchema(STRINGS)] = None

    def source(self) -> Sequence[Prompt]:
        if not isinstance(self.prompts, list) or not self.prompts:
            raise refusal("prompts", self.prompts, "a non-empty list of strings or of lists of token ids")
        return self.prompts


class ChatBody(TrlRequest):
    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def source(self) -> Sequence[Prompt]:
        if not isinstance(self.messages, list) or not self.messages:
            raise refusal("messages", self.messages, "a non-empty list of conversations")
        return [
            ChatInput(
                messages=self._conversation(index, chat),
                tools=self.tools,
                chat_template=self.chat_template,
                template_kwargs=self.chat_template_kwargs,
            )
            for index, chat in enumerate(self.messages)
        ]

    def _conversation(self, index: int, chat: Any) -> list[dict[str, Any]]:
        if not isinstance(chat, list) or not chat:
            raise refusal(f"messages[{index}]", chat, "a non-empty list of messages")
        return chat


@router.post("/chat")
@router.post("/chat/")
async def chat(request: Request) -> Response:
    body = parse_model(request, ChatBody, _merged(decode_object(await request.body()), "messages"))
    return await _answer(request, body, body.source(), "messages")


async def generate(request: Request, data: dict[str, Any]) -> Response:
    body = parse_model(request, GenerateBody, _merged(data, "prompts"))
    return await _answer(request, body, body.source(), "prompts")


def _merged(data: dict[str, Any], prompts: str) -> dict[str, Any]:
    """With the fields of `generation_kwargs`, which hold sampling fields alone."""
    for name in REGEX_FIELDS:
        if data.get(name) is not None:
            data = {**data, "guided_regex": data[name]}
    images = data.get("images")
    if images is None or (isinstance(images, list) and not any(images)):
        data = {name: value for name, value in data.items() if name != "images"}
    kwargs = data.get(KWARGS)
    if not isinstance(kwargs, dict):
        return data
    return {**data, **{name: value for name, value in kwargs.items() if name not in (prompts, KWARGS)}}


async def _answer(request: Request, body: TrlRequest, source: Sequence[Prompt], prompt_field: str) -> Response:
    body.check_common()
    grammar = body.grammar()
    options = RequestOptions(
        prefix="trl",
        name=keep_request_id(request, body.request_id),
        add_special_tokens=body.add_special_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        priority=body.priority or 0,
        timeout_s=body.timeout_s,
        cache_salt=body.cache_salt,
        trace_parent=context_of(request).trace_parent,
        names=with_grammar({"prompt": prompt_field}, grammar),
    )
    job = Job(
        source=source,
        params=constrained(body.sampling_params({}, logprobs=body.logprobs), grammar),
        options=options,
        is_stream=False,
        make_reply=lambda prepared, _: TrlReply(prepared.submit.prompts, prepared.submit.params.logprobs is not None),
    )
    return await answer(request, job)


@dataclass(frozen=True, slots=True)
class TrlReply:
    """`Reply` of both routes."""

    prompts: tuple[tuple[int, ...], ...]
    has_logprobs: bool

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> Any:
        rows = [[_by_rank(row) for row in parts.logprobs] for parts in choices] if self.has_logprobs else None
        return {
            "prompt_ids": self.prompts,
            "completion_ids": [parts.token_ids for parts in choices],
            "logprobs": rows and [[[entry.logprob for entry in row] for row in choice] for choice in rows],
            "logprob_token_ids": rows and [[[entry.token_id for entry in row] for row in choice] for choice in rows],
        }

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        return b""  # nothing streams

    def end(self, usage: Usage) -> bytes:
        return b""

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        return error_end(info)


def _by_rank(row: TokenLogprob) -> list[TokenLogprob | TopLogprob]:
    """The token of the position and the most likely ones, the likeliest first."""
    entries: dict[int, TokenLogprob | TopLogprob] = {entry.token_id: entry for entry in row.top}
    entries.setdefault(row.token_id, row)
    return sorted(entries.values(), key=lambda entry: entry.rank)
