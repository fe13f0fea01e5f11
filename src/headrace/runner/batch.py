"""The persistent batch: what a worker remembers of every running sequence between steps, by slot.

`model_runner.py` owns one. It applies a plan's differences, turns rows of the plan into the arrays of `StepInputs`,
and appends the tokens that were sampled. Nearly all of it is columns over slots: a decode step costs a handful of
numpy calls whatever the number of sequences. It knows nothing of why a sequence comes or leaves.

    token_ids[slot]     |---- computed: KV in the blocks ----|-- known, not computed --|   free   |
                        0                       num_computed              num_tokens
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from headrace.kernels.ops import StepInputs
from headrace.runner.edits import LogitEdits
from headrace.runner.random import SEED_MASK
from headrace.runner.sampler import SamplingRows
from headrace.transport.plan import NewSequence, StepPlan
from headrace.types import SamplingParams


@dataclass(slots=True)
class SlotState:
    """What of a sequence is not a column: it varies in length, or few sequences have it."""

    params: SamplingParams
    num_prompt_tokens: int
    edits: LogitEdits | None
    num_prompt_logprobs: int  # rows delivered so far

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's rows (one per token after the first) are still to be delivered."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a plan that one forward pass computes."""

    slots: np.ndarray  # int64 [S]
    num_tokens: np.ndarray  # int64 [S]
    samples: np.ndarray  # bool [S]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive rows of a pass's logits that score prompt tokens of one slot, from `first_token` on."""

    slot: int
    first_row: int
    num_rows: int
    first_token: int


class PersistentBatch:
    """Per-slot state, changed only by `apply`, `advance` and `append`. Used by one thread."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_tokens: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`max_tokens`: the longest a sequence can get."""
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        # Never zeroed: the system backs only the pages that sequences really fill.
        self._token_ids = np.empty((max_num_seqs, max_tokens + 1), np.int32)
        self._block_tables = np.zeros((max_num_seqs, -(-max_tokens // block_size) + 1), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        self._table_lens = np.zeros(max_num_seqs, np.int64)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._temperature = np.ones(max_num_seqs, np.float64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        self._states: list[SlotState | None] = [None] * max_num_seqs
        self._edited: set[int] = set()
        self._scored: set[int] = set()  # slots that want prompt log probabilities

    # ------------------------------------------------------------------------------------------------ differences

    def apply(self, plan: StepPlan) -> None:
        """Lets `released` leave, `new` enter, and appends the scheduled rows' new blocks."""
        for slot in plan.released:
            self._release(slot)
        for sequence in plan.new:
            self._enter(sequence)
        for slot, block_ids in zip(plan.slots, plan.new_block_ids, strict=True):
            if block_ids:
                self._append_blocks(slot, block_ids)

    def _release(self, slot: int) -> None:
        assert self._states[slot] is not None, f"slot {slot} is released but free"
        self._states[slot] = None
        self._edited.discard(slot)
        self._scored.discard(slot)

    def _enter(self, new: NewSequence) -> None:
        slot, params, num_tokens = new.slot, new.params, len(new.token_ids)
        assert self._states[slot] is None, f"slot {slot} is given away but in use"
        assert 0 < new.num_prompt_tokens <= num_tokens < self._token_ids.shape[1]
        assert 0 <= new.num_computed_tokens < num_tokens, "the last token must be computed to sample the next"
        token_ids = self._token_ids[slot, :num_tokens]
        token_ids[:] = new.token_ids
        assert ((token_ids >= 0) & (token_ids < self._vocab_size)).all(), "token ids are checked at submit"
        self._num_tokens[slot] = num_tokens
        self._num_computed[slot] = new.num_computed_tokens
        self._table_lens[slot] = 0
        self._append_blocks(slot, new.block_ids)
        self._seeds[slot] = new.seed & SEED_MASK
        self._temperature[slot] = params.temperature
        self._top_k[slot] = max(params.top_k, 0)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        edits = None
        if LogitEdits.needed(params):
            edits = LogitEdits(params, token_ids, new.num_prompt_tokens, self._vocab_size, self._eos_token_ids)
            self._edited.add(slot)
        self._states[slot] = state = SlotState(params, new.num_prompt_tokens, edits, new.num_prompt_logprobs)
        if state.wants_prompt_logprobs:
            assert new.num_computed_tokens <= new.num_prompt_logprobs, "cached positions cannot be scored"
            self._scored.add(slot)

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        start = int(self._table_lens[slot])
        stop = start + len(block_ids)
        assert stop <= self._block_tables.shape[1], f"slot {slot} has more blocks than its longest text needs"
        assert all(0 <= block_id < self._num_blocks for block_id in block_ids)
        self._block_tables[slot, start:stop] = block_ids
        self._table_lens[slot] = stop

    # ----------------------------------------------------------------------------------------------------- reading

    def state(self, slot: int) -> SlotState:
        state = self._states[slot]
        assert state is not None, f"slot {slot} is free"
        return state

    def token_ids(self, slot: int) -> np.ndarray:
        """A view: all tokens of a sequence so far."""
        return self._token_ids[slot, : self._num_tokens[slot]]

    def num_computed(self, slot: int) -> int:
        return int(self._num_computed[slot])

    @property
    def scored_slots(self) -> set[int]:
        """Slots whose prompt log probabilities are not all delivered."""
        return self._scored

    def rows(self, plan: StepPlan) -> Rows:
        """The plan's rows, checked against what the slots hold."""
        slots = np.array(plan.slots, np.int64)
        num_tokens = np.array(plan.num_tokens, np.int64)
        samples = np.array(plan.samples, np.bool_)
        assert slots.shape == num_tokens.shape == samples.shape
        assert all(self._states[slot] is not None for slot in plan.slots), "a free slot is scheduled"
        assert len(set(plan.slots)) == len(plan.slots), "a slot is scheduled twice"
        ends = self._num_computed[slots] + num_tokens
        known = self._num_tokens[slots]
        assert (num_tokens > 0).all()
        assert (ends <= known).all(), "more tokens are scheduled than are known"
        assert (ends[samples] == known[samples]).all(), "a token is sampled before all known ones are computed"
        assert (ends <= self._table_lens[slots] * self._block_size).all(), "tokens are scheduled without blocks"
        return Rows(slots, num_tokens, samples)

    def inputs(self, rows: Rows) -> tuple[StepInputs, list[PromptRows]]:
        """One pass as arrays. The sampling rows' logits come first, in the order of `rows`, then those of prompts."""
        slots, starts = rows.slots, self._num_computed[rows.slots]
        context_lens = starts + rows.num_tokens
        query_starts = np.zeros(slots.shape[0] + 1, np.int64)
        np.cumsum(rows.num_tokens, out=query_starts[1:])
        if query_starts[-1] == slots.shape[0]:  # one token each: no need to spread slots over tokens
            slots_T, positions = slots, starts
        else:
            slots_T = np.repeat(slots, rows.num_tokens)
            positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, rows.num_tokens)
        block, offset = np.divmod(positions, self._block_size)
        logit_rows = query_starts[1:][rows.samples] - 1
        prompt_rows: list[PromptRows] = []
        if self._scored:
            prompt_rows, more = self._prompt_rows(rows, starts, query_starts, logit_rows.shape[0])
            logit_rows = np.concatenate((logit_rows, more))
        width = -(-int(context_lens.max()) // self._block_size)
        inputs = StepInputs(
            token_ids_T=self._token_ids[slots_T, positions],
            positions_T=positions.astype(np.int32),
            kv_slots_T=self._block_tables[slots_T, block].astype(np.int64) * self._block_size + offset,
            query_starts=query_starts.astype(np.int32),
            context_lens_S=context_lens.astype(np.int32),
            block_tables_SB=self._block_tables[slots, :width],
            logit_rows_R=logit_rows.astype(np.int32),
        )
        return inputs, prompt_rows

    def _prompt_rows(
        self, rows: Rows, starts: np.ndarray, query_starts: np.ndarray, first_row: int
    ) -> tuple[list[PromptRows], np.ndarray]:
        """The logits at position p - 1 score prompt token p; those that an earlier life delivered are left out."""
        found: list[PromptRows] = []
        indices: list[np.ndarray] = [np.empty(0, np.int64)]
        for i, slot in enumerate(rows.slots.tolist()):
            if slot not in self._scored:
                continue
            state = self.state(slot)
            start = int(starts[i])
            first = max(start, state.num_prompt_logprobs)
            stop = min(start + int(rows.num_tokens[i]), state.num_prompt_tokens - 1)
            if first < stop:
                found.append(PromptRows(slot, first_row, stop - first, first + 1))
                indices.append(np.arange(first, stop) + (int(query_starts[i]) - start))
                first_row += stop - first
        return found, np.concatenate(indices)

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """How these slots sample their next token."""
        edits = {}
        if self._edited:
            for i, slot in enumerate(slots.tolist()):
                state = self.state(slot)
                if state.edits is not None:
                    edits[i] = (state.edits, self.token_ids(slot))
        return SamplingRows(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seeds[slots],
            positions=self._num_tokens[slots],
            edits=edits,
        )

    # ---------------------------------------------------------------------------------------------------- progress

    def advance(self, rows: Rows) -> None:
        """The pass has computed these rows."""
        self._num_computed[rows.slots] += rows.num_tokens

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Each of these slots got one more token."""
        self._token_ids[slots, self._num_tokens[slots]] = token_ids
        self._num_tokens[slots] += 1
        if self._edited:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                edits = self.state(slot).edits
                if edits is not None:
                    edits.append(token_id)

    def delivered(self, slot: int, num_rows: int) -> None:
        """That many more rows of a slot's prompt log probabilities are in a result."""
        state = self.state(slot)
        state.num_prompt_logprobs += num_rows
        if not state.wants_prompt_logprobs:
            self._scored.discard(slot)
