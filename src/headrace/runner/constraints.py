"""Sequences that are not free in what comes next: a grammar's matcher per slot, a budget of thoughts, or both.

`model_runner.py` owns one. A grammar's mask follows from the tokens before it alone, so a thread computes it from the
moment that they are known: while the engine works between two steps, and beside the forward pass. Matchers and
followers (`thinking.py`) are fed the sequence's own output, so one that left and came back goes on where it was.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from headrace.grammar import GrammarCompiler, GrammarError, Matcher
from headrace.runner.thinking import ThinkingFollower, only
from headrace.transport.plan import NewSequence, StepPlan

Mask = np.ndarray | str
"""Float32 [V] to add to logits, 0 or -inf; or why there is none."""

FAILED = "the output cannot follow its grammar any more: "


class Constraints:
    """Used by one thread; starts another one with the first grammar."""

    def __init__(self, grammars: GrammarCompiler | None, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._thoughts: dict[int, ThinkingFollower] = {}  # by slot
        self._matchers: dict[int, Matcher | str] = {}  # by slot; a text says why there is none
        self._pool: ThreadPoolExecutor | None = None
        self._masks: dict[int, Future[dict[int, Mask]]] = {}  # by slot, whose own is in it, of the next token

    def apply(self, plan: StepPlan) -> None:
        """Lets sequences leave and enter."""
        if self._matchers:
            for slot in plan.released:
                self._matchers.pop(slot, None)
                self._masks.pop(slot, None)
        if self._thoughts:
            for slot in plan.released:
                self._thoughts.pop(slot, None)
        for new in plan.new:
            if new.params.thinking is not None:
                output = new.token_ids[new.num_prompt_tokens :]
                self._thoughts[new.slot] = ThinkingFollower(new.params.thinking, output)
            if new.params.grammar is not None:
                self._enter(new)

    def _enter(self, new: NewSequence) -> None:
        assert self._grammars is not None, "the engine refuses grammars that nobody compiles"
        assert new.params.grammar is not None
        try:
            compiled = self._grammars.get(new.params.grammar)
            self._matchers[new.slot] = compiled.matcher(new.token_ids[new.num_prompt_tokens :])
        except GrammarError as error:
            self._matchers[new.slot] = str(error)
        self._begin([new.slot])

    def _begin(self, slots: list[int]) -> None:
        """One job for all: a thread costs more to wake than a mask to compute."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")
        job = self._pool.submit(_compute, {slot: self._matchers[slot] for slot in slots})
        self._masks.update(dict.fromkeys(slots, job))

    def masks(self, slots: list[int]) -> dict[int, Mask]:
        """What binds the next tokens of these slots, by row."""
        jobs = self._masks
        masks = {row: jobs[slot].result()[slot] for row, slot in enumerate(slots) if slot in jobs} if jobs else {}
        if self._thoughts:
            self._end_thoughts(slots, masks)
        return masks

    def _end_thoughts(self, slots: list[int], masks: dict[int, Mask]) -> None:
        """Where a budget is used up. A grammar may want the rest of a character first: it wins, for a token."""
        for row, slot in enumerate(slots):
            follower, mask = self._thoughts.get(slot), masks.get(row)
            forced_id = None if follower is None else follower.forced_id
            if forced_id is None or isinstance(mask, str) or (mask is not None and mask[forced_id] != 0):
                continue
            masks[row] = only(forced_id, self._vocab_size)

    def append(self, slots: list[int], token_ids: list[int]) -> None:
        """These slots have got one more token each."""
        if self._thoughts:
            for slot, token_id in zip(slots, token_ids, strict=True):
                if (follower := self._thoughts.get(slot)) is not None:
                    follower.accept(token_id)
        if not self._matchers:
            return
        constrained = []
        for slot, token_id in zip(slots, token_ids, strict=True):
            matcher = self._matchers.get(slot)
            if isinstance(matcher, Matcher):
                matcher.accept(token_id)
                constrained.append(slot)
        if constrained:
            self._begin(constrained)


def _compute(matchers: dict[int, Matcher | str]) -> dict[int, Mask]:
    return {slot: _mask(matcher) for slot, matcher in matchers.items()}


def _mask(matcher: Matcher | str) -> Mask:
    if isinstance(matcher, str):
        return FAILED + matcher
    mask = matcher.mask()
    return mask if mask is not None else FAILED + (matcher.error or "for no known reason")
