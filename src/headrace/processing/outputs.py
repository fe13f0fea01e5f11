"""From the engine's deltas of token ids to deltas of text: detokenises, finds stop strings, counts usage.

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

import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from headrace.client.base import Delta, OutputStream
from headrace.errors import ErrorInfo, InternalError
from headrace.processing.detokenize import IncrementalDetokenizer
from headrace.processing.logprobs import TokenLogprob, token_logprobs
from headrace.processing.stop import StopMatcher
from headrace.processing.tokenizer import Tokenizer
from headrace.transport.messages import Submit
from headrace.types import FinishReason, SamplingParams, Usage

__all__ = ["ChoiceAssembler", "OutputAssembler", "TextDelta", "TokenLogprob"]


@dataclass(slots=True)
class TextDelta:
    """What is new of one choice, as text. `token_ids` may run ahead of `text` where a character is unfinished."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
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

    @property
    def is_empty(self) -> bool:
        return not (
            self.text
            or self.token_ids
            or self.prompt_logprobs
            or self.finish_reason is not None
            or self.num_cached_tokens is not None
            or self.queue_s is not None
        )


class ChoiceAssembler:
    """The text of one choice."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        # Tokens that a stop string may still cut off: where the text begins, id, logprob.
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._num_chars = 0  # of the text before stop strings were looked for
        self._num_seen = 0
        self._num_received = 0
        self.num_tokens = 0
        """Tokens that are part of the output so far, the stop or EOS token included."""
        self.is_finished = False
        self.wants_abort = False
        """A stop string matched while the engine still generates."""

    def push(self, delta: Delta) -> TextDelta:
        """The next delta as text. After the finish everything is swallowed."""
        if self.is_finished:
            return TextDelta(delta.choice)
        out = TextDelta(
            delta.choice,
            num_cached_tokens=delta.num_cached_tokens,
            queue_s=delta.queue_s,
            prefill_s=delta.prefill_s,
            num_preemptions=delta.num_preemptions,
            weights_versions=tuple((self._num_received + index, version) for index, version in delta.weights_versions),
        )
        self._num_received += len(delta.token_ids)
        if delta.prompt_logprobs is not None:
            out.prompt_logprobs = token_logprobs(self._tokenizer, delta.prompt_logprobs)
        logprobs = None if delta.logprobs is None else token_logprobs(self._tokenizer, delta.logprobs)
        assert logprobs is None or len(logprobs) == len(delta.token_ids), "one row of logprobs per token"
        if self._matcher is None:
            out.text, out.token_ids, out.logprobs = self._text(delta), delta.token_ids, logprobs
        else:
            self._search(self._matcher, delta, logprobs, out)
        self.num_tokens += len(out.token_ids)
        if delta.finish_reason is not None and not self.is_finished:
            self.is_finished = True
            out.finish_reason, out.error = delta.finish_reason, delta.error
            if delta.stop_token_id in self._params.stop_token_ids:
                out.stop_reason = delta.stop_token_id
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

    def _search(self, matcher: StopMatcher, delta: Delta, logprobs: list[TokenLogprob] | None, out: TextDelta) -> None:
        """Token by token, so that where a match ends does not depend on the delta's size."""
        parts = []
        num_shown = len(delta.token_ids) - self._hides_last(delta)
        for index, token_id in enumerate(delta.token_ids):
            if index < num_shown:
                text, offset = self._detokenizer.step(token_id), self._detokenizer.offset
            else:
                text = self._detokenizer.flush()
                offset = len(text)
            self._waiting.append((self._num_chars + offset, token_id, logprobs[index] if logprobs else None))
            parts.append(self._match(matcher, text[:offset]))  # text of earlier tokens, held back until now
            self._num_seen += 1
            parts.append(self._match(matcher, text[offset:]))
            if matcher.matched is not None:
                break
        if delta.finish_reason is not None and matcher.matched is None:
            parts.append(self._match(matcher, self._detokenizer.flush()))
            if matcher.matched is None:
                parts.append(matcher.flush())
        out.text = "".join(parts)
        limit: float
        if matcher.matched is not None:
            limit = matcher.match_start + (len(matcher.matched) if self._params.include_stop_str_in_output else 0)
            self.is_finished = True
            self.wants_abort = delta.finish_reason is None
            out.finish_reason, out.stop_reason = FinishReason.STOP, matcher.matched
        elif delta.finish_reason is not None:
            limit = math.inf
        else:
            limit = matcher.num_emitted
        self._release(limit, out, has_logprobs=logprobs is not None)

    def _match(self, matcher: StopMatcher, text: str) -> str:
        self._num_chars += len(text)
        return matcher.push(text, armed=self._num_seen > self._params.min_tokens)

    def _release(self, limit: float, out: TextDelta, *, has_logprobs: bool) -> None:
        """Gives out the tokens whose text begins before `limit`."""
        logprobs = []
        while self._waiting and self._waiting[0][0] < limit:
            _, token_id, logprob = self._waiting.popleft()
            out.token_ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        if has_logprobs or logprobs:
            out.logprobs = logprobs


class OutputAssembler:
    """The outputs of one request: an async iterator of the text deltas that came since the last look.

    Each choice ends exactly once. A choice whose stop string matched is aborted in the engine; what the engine still
    says of it is swallowed. Belongs to the event loop of its stream.
    """

    def __init__(self, tokenizer: Tokenizer, request: Submit, stream: OutputStream) -> None:
        self._stream = stream
        self._n = request.params.n
        self._choices = [
            ChoiceAssembler(tokenizer, prompt, request.params) for prompt in request.prompts for _ in range(self._n)
        ]
        self._prompt_tokens = sum(len(prompt) for prompt in request.prompts)
        self._cached_tokens = 0

    @property
    def usage(self) -> Usage:
        """Counts so far: the prompt once per prompt, completions summed over choices."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=self._cached_tokens,
        )

    def num_tokens(self, choice: int) -> int:
        """Tokens of one choice so far."""
        return self._choices[choice].num_tokens

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        async for deltas in self._stream:
            if texts := self.feed(deltas):
                yield texts
        # The stream's contract is one finish per choice. A request that never ends is worse than one that says so.
        if lost := [index for index, choice in enumerate(self._choices) if not choice.is_finished]:
            error = InternalError("the stream of outputs ended before this choice did.").info()
            yield [TextDelta(index, finish_reason=FinishReason.ERROR, error=error) for index in lost]

    def feed(self, deltas: Sequence[Delta]) -> list[TextDelta]:
        """The text of these deltas, without those that say nothing."""
        texts = []
        for delta in deltas:
            choice = self._choices[delta.choice]
            if delta.num_cached_tokens is not None and delta.choice % self._n == 0:
                self._cached_tokens += delta.num_cached_tokens
            was_finished = choice.is_finished
            text = choice.push(delta)
            if choice.wants_abort and not was_finished:
                self._stream.abort_choice(delta.choice)
            if not text.is_empty:
                texts.append(text)
        return texts

    def close(self, reason: str = "disconnect") -> None:
        """Ends what still runs."""
        self._stream.close(reason)
