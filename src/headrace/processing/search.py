"""The text of one choice token by token: takes thoughts off it, finds stop strings in the rest, and says which tokens
are part of the output.

Used by `ChoiceAssembler` (outputs.py) for choices that have either; the others take a shorter way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.processing.detokenize import IncrementalDetokenizer
from headrace.processing.logprobs import TokenLogprob
from headrace.processing.reasoning import Phase, ReasoningParser
from headrace.processing.stop import StopMatcher
from headrace.types import SamplingParams

_BEFORE_CONTENT = -1  # where the text of a token begins that no stop string can cut off


@dataclass(slots=True)
class Found:
    """What some tokens have brought."""

    content: str
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None


class TokenSearch:
    """One choice. Nothing comes after a match."""

    def __init__(
        self, detokenizer: IncrementalDetokenizer, params: SamplingParams, thinking: ReasoningParser | None
    ) -> None:
        self._detokenizer = detokenizer
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(params.stop, include=self._includes_stop)
        self._thinking = thinking
        # Tokens that a stop string may still cut off: where the text begins, id, logprob.
        self._waiting: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._num_chars = 0  # of the content before stop strings were looked for
        self._num_seen = 0
        self._reasoning: list[str] = []
        self.num_reasoning_tokens = 0
        """Tokens amid the thoughts, without the markers (where a marker is one token)."""

    @property
    def matched(self) -> str | None:
        return self._matcher.matched

    def push(
        self, token_ids: Sequence[int], num_shown: int, logprobs: list[TokenLogprob] | None, *, is_last: bool
    ) -> Found:
        """Where a match ends does not depend on how many tokens come at once. `num_shown`: tokens with a text."""
        thinking, matcher = self._thinking, self._matcher
        parts = []
        for index, token_id in enumerate(token_ids):
            if index < num_shown:
                text, offset = self._detokenizer.step(token_id), self._detokenizer.offset
            else:
                text = self._detokenizer.flush()
                offset = len(text)
            position = self._num_chars + offset
            if thinking is not None:
                before = thinking.phase
                position += thinking.num_held
            if offset:
                parts.append(self._match(text[:offset]))  # text of earlier tokens, held back until now
                text = text[offset:]
            self._num_seen += 1
            parts.append(self._match(text))
            if thinking is not None and before is not Phase.ANSWER:
                position = self._position_after(thinking, before, position)
                self.num_reasoning_tokens += before is thinking.phase is Phase.THINKING and index < num_shown
            self._waiting.append((position, token_id, logprobs[index] if logprobs else None))
            if matcher.matched is not None:
                break
        if is_last and self.matched is None:
            parts.append(self._finish())
        found = Found("".join(parts))
        if self._reasoning:
            found.reasoning = "".join(self._reasoning)
            self._reasoning.clear()
        self._release(found, is_last=is_last, has_logprobs=logprobs is not None)
        return found

    def _position_after(self, thinking: ReasoningParser, before: Phase, position: int) -> int:
        """Where a token's text begins that came before the answer, now that more is known."""
        if not thinking.has_thought:
            return position
        if before is Phase.START:
            self._waiting = deque((_BEFORE_CONTENT, *rest) for _, *rest in self._waiting)  # type: ignore[misc]
        return _BEFORE_CONTENT

    def _match(self, text: str) -> str:
        if self._thinking is not None:
            reasoning, text = self._thinking.feed(text)
            if reasoning:
                self._reasoning.append(reasoning)
        self._num_chars += len(text)
        return self._matcher.push(text, armed=self._num_seen > self._min_tokens)

    def _finish(self) -> str:
        text = self._match(self._detokenizer.flush())
        if self._thinking is not None and self.matched is None:
            reasoning, rest = self._thinking.finish()
            self._reasoning.append(reasoning)
            self._num_chars += len(rest)
            text += self._matcher.push(rest, armed=self._num_seen > self._min_tokens)
        return text if self.matched is not None else text + self._matcher.flush()

    def _release(self, found: Found, *, is_last: bool, has_logprobs: bool) -> None:
        """Gives out the tokens whose text begins in what has been given out."""
        matcher = self._matcher
        limit: float
        if matcher.matched is not None:
            limit = matcher.match_start + (len(matcher.matched) if self._includes_stop else 0)
        else:
            limit = math.inf if is_last else matcher.num_emitted
        logprobs = []
        while self._waiting and self._waiting[0][0] < limit:
            _, token_id, logprob = self._waiting.popleft()
            found.token_ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        if has_logprobs or logprobs:
            found.logprobs = logprobs
