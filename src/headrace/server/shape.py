"""What a reply is made of, for both routes and both modes: the request's wishes, collected choices, usage.

`chat_reply.py` and `completion_reply.py` give these their JSON; `generation.py` fills them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import ErrorInfo, FailedRequest, InternalError, RequestError
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.outputs import TextDelta
from headrace.processing.tools import ToolCallDelta
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
class ChoiceVersions:
    """Which weights made which tokens of a choice."""

    starts: list[tuple[int, str]] = field(default_factory=list)  # (token, version from there on)
    num_tokens: int = 0

    @property
    def last(self) -> str | None:
        """Of the newest token; None if there is none."""
        return self.starts[-1][1] if self.starts else None

    def spans(self) -> list[dict[str, Any]]:
        """[start, end) of the tokens of each version."""
        ends = [*(start for start, _ in self.starts[1:]), self.num_tokens]
        return [
            {"version": version, "start": start, "end": min(end, self.num_tokens)}
            for (start, version), end in zip(self.starts, ends, strict=False)
            if start < self.num_tokens
        ]

    def members(self) -> dict[str, Any]:
        """The choice's member for a request that crossed a refresh; nothing for all others."""
        if len(self.starts) < 2:
            return {}
        spans = self.spans()
        return {"weight_versions": spans} if len(spans) > 1 else {}


@dataclass(slots=True)
class CallParts:
    """What has come of one tool call. Without id and name: more of one whose beginning has been sent."""

    index: int
    id: str | None
    name: str | None
    arguments: list[str] = field(default_factory=list)
    position: int = 0  # characters of content before it
    num_rows: int = 0  # of logprobs before it

    def members(self) -> dict[str, Any]:
        arguments = "".join(self.arguments)
        if self.id is None:
            return {"function": {"arguments": arguments}}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(slots=True)
class ChoiceParts:
    """What has come of one choice: all of it for a plain reply, what is not sent yet in a stream."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallParts] = field(default_factory=list)
    has_calls: bool = False  # ever
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    versions: ChoiceVersions = field(default_factory=ChoiceVersions)
    num_chars: int = 0  # of content, ever
    num_cached_tokens: int = 0  # of its prompt
    embedding: bytes | None = None  # float32, in place of all else

    def add(self, delta: TextDelta) -> None:
        self.versions.starts.extend(delta.weights_versions)
        self.versions.num_tokens += len(delta.token_ids)
        if delta.text:
            self.text.append(delta.text)
            self.num_chars += len(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        if delta.calls:
            self.has_calls = True
            self._add_calls(delta.calls)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.embedding = delta.embedding

    def drop_sent(self) -> None:
        """Keeps what describes the whole choice, and not what has gone out."""
        self.text, self.token_ids = [], []
        if self.reasoning:
            self.reasoning = []
        if self.calls:
            self.calls = []
        if self.logprobs:
            self.logprobs = []
        if self.prompt_logprobs:
            self.prompt_logprobs = []

    def _add_calls(self, calls: Sequence[ToolCallDelta]) -> None:
        for call in calls:
            if not self.calls or self.calls[-1].index != call.index:
                position = self.num_chars if call.position is None else call.position
                self.calls.append(CallParts(call.index, call.id, call.name, [], position, len(self.logprobs)))
            self.calls[-1].arguments.append(call.arguments)


def has_text_alone(delta: TextDelta) -> bool:
    """Of a request that asked for neither logprobs nor token ids."""
    return delta.finish_reason is None and not (delta.reasoning or delta.calls or delta.weights_versions)


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

    def body(self, choices: Sequence[ChoiceParts], usage: Usage) -> Any:
        """A plain reply; `choices` by index. May raise RequestError, as `frames` may."""
        ...

    def frames(self, deltas: Sequence[TextDelta], usage: Usage) -> bytes:
        """The next events of a stream, complete; may be empty."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream whose choices have all ended."""
        ...

    def fail(self, info: ErrorInfo, usage: Usage) -> bytes:
        """The last events of any other stream."""
        ...


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def failure(delta: TextDelta) -> RequestError | None:
    """The error that a choice's end stands for, if it is one. What a control operation has ended is none: its sender
    gets what there is, with `finish_reason` abort, as trainers expect."""
    if delta.error is not None:
        return FailedRequest(delta.error)
    if delta.finish_reason is FinishReason.ERROR:
        return InternalError("The engine failed on this request.")
    return None


def weight_version(choices: Iterable[ChoiceParts]) -> dict[str, Any]:
    """The reply's member: the newest version that made any of its tokens."""
    versions = [parts.versions.last for parts in choices if parts.versions.last is not None]
    return {"weight_version": versions[-1] if versions else None}
