"""From the engine's deltas of token ids to deltas of text, in this order: detokenises, takes thoughts off, finds stop
strings in what is left, takes tool calls out of that; counts usage.

`ChoiceAssembler` does one choice, `OutputAssembler` all choices of a request; the routes and the offline `LLM`
iterate the latter. What comes out does not depend on how the engine cut the tokens into deltas. Rules where APIs
differ are vLLM's:

* The stop or EOS token counts and its id is the last one, but its text is left out, unless
  `include_stop_str_in_output` (and even then a special token shows only with `skip_special_tokens` off).
  `stop_reason` is the id of a `stop_token_ids` token, None for EOS.
* A stop string counts only if it ends in a token after the first `min_tokens`. Ours alone: tokens whose text begins
  at or after the cut are no part of the output (ids, logprobs, usage), so that ids and text say the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from headrace.client.base import Delta, OutputStream
from headrace.errors import ErrorInfo, InternalError
from headrace.processing.by_token import by_token
from headrace.processing.detokenize import IncrementalDetokenizer
from headrace.processing.logprobs import TokenLogprob, token_logprobs
from headrace.processing.parsing import ReplyParsing
from headrace.processing.search import TokenSearch
from headrace.processing.tokenizer import Tokenizer
from headrace.processing.tools import ToolCallDelta, ToolOutput, ToolParser
from headrace.transport.messages import Submit
from headrace.types import FinishReason, SamplingParams, Usage

__all__ = ["ChoiceAssembler", "OutputAssembler", "TextDelta", "TokenLogprob"]


class TextDelta(msgspec.Struct, gc=False):
    """What is new of one choice, as text. `token_ids` may run ahead of `text` where a character is unfinished."""

    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None  # one per token id, if asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # from the prompt's second token on
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int | None = None  # this and the next three: as in Delta
    queue_s: float | None = None
    prefill_s: float | None = None
    num_preemptions: int = 0
    weights_versions: tuple[tuple[int, str], ...] = ()  # (index into the choice's tokens, version from there on)
    reasoning: str = ""  # comes before `text`
    calls: Sequence[ToolCallDelta] = ()  # come after `text`
    embedding: bytes | None = None  # as in Delta

    @property
    def is_empty(self) -> bool:
        return not (
            self.text
            or self.token_ids
            or self.prompt_logprobs
            or self.finish_reason is not None
            or self.num_cached_tokens is not None
            or self.queue_s is not None
            or self.weights_versions
            or self.reasoning
            or self.calls
        )


class ChoiceAssembler:
    """The text of one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        parsing: ReplyParsing | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=frozenset() if parsing is None else parsing.shown_token_ids,
        )
        thinking = None if parsing is None else parsing.reasoning_parser()
        self._search: TokenSearch | None = None
        if params.stop or thinking is not None:
            self._search = TokenSearch(self._detokenizer, params, thinking)
        self._tools = None if parsing is None else parsing.tool_parser()
        self._is_parallel = parsing is None or parsing.is_parallel
        self._shows_reasoning = parsing is None or parsing.shows_reasoning
        self._is_plain = self._search is None and self._tools is None
        self._num_received = 0
        self.num_tokens = 0
        """Tokens that are part of the output so far, the stop or EOS token included."""
        self.is_finished = False
        self.wants_abort = False
        """A stop string matched while the engine still generates."""

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._search is None else self._search.num_reasoning_tokens

    def push(self, delta: Delta) -> TextDelta:
        """The next delta as text. After the finish everything is swallowed."""
        if self.is_finished:
            return TextDelta(delta.choice)
        if self._is_plain and _has_tokens_alone(delta):
            token_ids = delta.token_ids
            num_tokens = len(token_ids)
            self._num_received += num_tokens
            self.num_tokens += num_tokens
            return TextDelta(delta.choice, self._detokenizer.push(token_ids), token_ids)
        out = TextDelta(
            delta.choice,
            num_cached_tokens=delta.num_cached_tokens,
            queue_s=delta.queue_s,
            prefill_s=delta.prefill_s,
            num_preemptions=delta.num_preemptions,
        )
        if delta.weights_versions:
            out.weights_versions = tuple(
                (self._num_received + index, version) for index, version in delta.weights_versions
            )
        self._num_received += len(delta.token_ids)
        if delta.prompt_logprobs is not None:
            out.prompt_logprobs = token_logprobs(self._tokenizer, delta.prompt_logprobs)
        logprobs = None if delta.logprobs is None else token_logprobs(self._tokenizer, delta.logprobs)
        assert logprobs is None or len(logprobs) == len(delta.token_ids), "one row of logprobs per token"
        if self._search is None:
            out.text, out.token_ids, out.logprobs = self._text(delta), delta.token_ids, logprobs
        else:
            self._find(self._search, delta, logprobs, out)
        self.num_tokens += len(out.token_ids)
        if delta.finish_reason is not None and not self.is_finished:
            self.is_finished = True
            out.finish_reason, out.error, out.embedding = delta.finish_reason, delta.error, delta.embedding
            if delta.stop_token_id in self._params.stop_token_ids:
                out.stop_reason = delta.stop_token_id
        if self._tools is not None:
            self._take_calls(self._tools, out)
        return out

    def _hides_last(self, delta: Delta) -> bool:
        """Whether the delta's last token is a stop or EOS token whose text is left out."""
        return (
            delta.finish_reason is FinishReason.STOP
            and delta.stop_token_id is not None
            and bool(delta.token_ids)
            and not self._params.include_stop_str_in_output
        )

    def _text(self, delta: Delta) -> str:
        ids = delta.token_ids[:-1] if self._hides_last(delta) else delta.token_ids
        text = self._detokenizer.push(ids)
        return text if delta.finish_reason is None else text + self._detokenizer.flush()

    def _find(self, search: TokenSearch, delta: Delta, logprobs: list[TokenLogprob] | None, out: TextDelta) -> None:
        num_shown = len(delta.token_ids) - self._hides_last(delta)
        found = search.push(delta.token_ids, num_shown, logprobs, is_last=delta.finish_reason is not None)
        out.text, out.reasoning, out.token_ids, out.logprobs = (
            found.content,
            found.reasoning,
            found.token_ids,
            found.logprobs,
        )
        if not self._shows_reasoning:
            out.reasoning = ""
        if search.matched is not None:
            self.is_finished = True
            self.wants_abort = delta.finish_reason is None
            out.finish_reason, out.stop_reason = FinishReason.STOP, search.matched

    def _take_calls(self, tools: ToolParser, out: TextDelta) -> None:
        """The calls out of the text; with `parallel_tool_calls` off only the first."""
        parsed = tools.feed(out.text) if out.text else ToolOutput()
        text, calls = parsed.content, parsed.calls
        if self.is_finished:
            rest = tools.finish()
            text, calls = text + rest.content, [*calls, *rest.calls]
        out.text, out.calls = text, calls if self._is_parallel else [call for call in calls if call.index == 0]


def _has_tokens_alone(delta: Delta) -> bool:
    """As all but the first and the last of a choice do, if nothing was asked for but its text."""
    return (
        delta.finish_reason is None
        and delta.logprobs is None
        and delta.queue_s is None
        and delta.num_cached_tokens is None
        and delta.prompt_logprobs is None
        and not delta.weights_versions
        and not delta.num_preemptions
    )


class OutputAssembler:
    """The outputs of one request: an async iterator of the text deltas that came since the last look.

    Each choice ends exactly once. A choice whose stop string matched is aborted in the engine; what the engine still
    says of it is swallowed. Belongs to the event loop of its stream.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: Submit, stream: OutputStream, parsing: ReplyParsing | None = None
    ) -> None:
        self._stream = stream
        self._deltas = aiter(stream)
        self._n = request.params.n
        self._choices = [
            ChoiceAssembler(tokenizer, prompt, request.params, parsing)
            for prompt in request.prompts
            for _ in range(self._n)
        ]
        self._has_reasoning = parsing is not None and parsing.reasoning is not None
        self._is_by_token = parsing is not None and parsing.tools is not None and request.params.logprobs is not None
        self.usage = Usage(prompt_tokens=sum(map(len, request.prompts)))
        """Counts so far: the prompt once per prompt, completions summed over choices."""

    def num_tokens(self, choice: int) -> int:
        """Tokens of one choice so far."""
        return self._choices[choice].num_tokens

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        return self

    async def __anext__(self) -> list[TextDelta]:
        try:
            while True:
                if texts := self.feed(await self._deltas.__anext__()):
                    return texts
        except StopAsyncIteration:
            if lost := self.end():
                return lost
            raise

    def end(self) -> list[TextDelta]:
        """Ends for choices that have none, though a stream's contract is one for each. A request that never ends is
        worse than one that says so."""
        lost = [index for index, choice in enumerate(self._choices) if not choice.is_finished]
        if not lost:
            return []
        for index in lost:
            self._choices[index].is_finished = True
        error = InternalError("the stream of outputs ended before this choice did.").info()
        return [TextDelta(index, finish_reason=FinishReason.ERROR, error=error) for index in lost]

    def feed(self, deltas: Sequence[Delta]) -> list[TextDelta]:
        """The text of these deltas, without those that say nothing."""
        texts = []
        if self._is_by_token:
            deltas = [part for delta in deltas for part in by_token(delta)]
        for delta in deltas:
            choice = self._choices[delta.choice]
            if delta.num_cached_tokens is not None and delta.choice % self._n == 0:
                self.usage.cached_tokens += delta.num_cached_tokens
            was_finished = choice.is_finished
            text = choice.push(delta)
            self.usage.completion_tokens += len(text.token_ids)
            if choice.wants_abort and not was_finished:
                self._stream.abort_choice(delta.choice)
            if not text.is_empty:
                texts.append(text)
        if self._has_reasoning:
            self.usage.reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self._choices)
        return texts

    def close(self, reason: str = "disconnect") -> None:
        """Ends what still runs."""
        self._stream.close(reason)
