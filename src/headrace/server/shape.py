"""What a reply is made of, for both routes and both modes: the request's wishes, collected choices, usage.

`chat_reply.py` and `completion_reply.py` give these their JSON; `generation.py` fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import ErrorInfo, FailedRequest, InternalError, RequestError, Unavailable
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.types import FinishReason, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """How the sender wants the reply."""

    id: str
    created: int
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    num_top: int | None = None  # logprobs per token; None: none, -1: all
    as_ids: bool = False  # return_tokens_as_token_ids
    return_token_ids: bool = False
    wants_prompt_logprobs: bool = False
    echo_texts: tuple[str, ...] = ()  # one per prompt; empty without echo
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(slots=True)
class ChoiceParts:
    """What has come of one choice: all of it for a plain reply, what is not sent yet in a stream."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: TextDelta) -> None:
        if delta.text:
            self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class PromptRows:
    """Prompt logprobs by prompt: the choices of one prompt share them, whichever of them brought the rows."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._rows: dict[int, list[TokenLogprob]] = {}

    def of(self, choice: int, own: list[TokenLogprob]) -> list[TokenLogprob]:
        known = self._rows.get(choice // self._n, [])
        if len(own) >= len(known):
            self._rows[choice // self._n] = own
            return own
        return known


class Reply(Protocol):
    """The JSON of one route."""

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> dict[str, Any]:
        """A plain reply; `choices` by index."""
        ...

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        """The next events of a stream, complete; may be empty."""
        ...

    def usage_frame(self, usage: Usage) -> bytes:
        """The event before [DONE]; empty when it was not asked for."""
        ...


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def failure(delta: TextDelta) -> RequestError | None:
    """The error that a choice's end stands for, if it is one: on these routes an abort is an error (503 `aborted`)."""
    return failure_of(delta.finish_reason, delta.error)


def failure_of(reason: FinishReason | None, error: ErrorInfo | None) -> RequestError | None:
    if reason is not FinishReason.ERROR and reason is not FinishReason.ABORT:
        return None
    if error is not None:
        return FailedRequest(error)
    if reason is FinishReason.ERROR:
        return InternalError("The engine failed on this request.")
    return Unavailable("The request was aborted by a control operation.", code="aborted")
