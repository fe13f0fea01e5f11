"""The persistent batch: what a worker remembers of every running sequence between steps, by slot.

`model_runner.py` owns one. It applies a plan's differences, turns rows of the plan into the arrays of `StepInputs`,
and appends the tokens that were sampled. Between two decodes the kernels empty the caches, so each different function
that numpy runs here costs far more than its handful of numbers: what is read in every step are plain lists and ints.
It knows nothing of why a sequence comes or leaves.

    token_ids[slot]     |---- computed: KV in the blocks ----|-- known, not computed --|
                        0                       num_computed                        len
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from headrace.kernels.ops import StepInputs
from headrace.runner.block_tables import BlockTables
from headrace.runner.edits import LogitEdits
from headrace.runner.pooling import PooledRows, Pooler
from headrace.runner.sampler import GREEDY_BELOW, SamplingRows
from headrace.transport.plan import NewSequence, StepPlan
from headrace.types import SamplingParams


@dataclass(slots=True)
class SlotState:
    """A sequence, as its worker knows it."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    token_ids: array[int]  # int32
    num_computed: int
    block_ids: list[int]
    edits: LogitEdits | None
    num_prompt_logprobs: int  # rows delivered so far
    pooler: Pooler | None = None  # it gives an embedding instead of tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's rows (one per token after the first) are still to be delivered."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a plan that one forward pass computes."""

    slots: list[int]
    states: list[SlotState]
    num_tokens: list[int]
    samples: list[bool]


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
        self._max_tokens = max_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._block_tables = BlockTables(max_num_seqs, -(-max_tokens // block_size) + 1)
        self._states: list[SlotState | None] = [None] * max_num_seqs
        # Slots that want more than the most likely token; a step without any skips what they need.
        self._sampled: set[int] = set()
        self._reporting: set[int] = set()  # log probabilities
        self._scored: set[int] = set()  # prompt log probabilities
        self._pooled: set[int] = set()  # an embedding, and no token at all

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
        for slots in (self._sampled, self._reporting, self._scored, self._pooled):
            slots.discard(slot)

    def _enter(self, new: NewSequence) -> None:
        slot, params, num_tokens = new.slot, new.params, len(new.token_ids)
        assert self._states[slot] is None, f"slot {slot} is given away but in use"
        assert 0 < new.num_prompt_tokens <= num_tokens <= self._max_tokens
        assert 0 <= new.num_computed_tokens < num_tokens, "the last token must be computed to sample the next"
        assert 0 <= min(new.token_ids) <= max(new.token_ids) < self._vocab_size, "token ids are checked at submit"
        self._states[slot] = state = SlotState(
            params=params,
            seed=new.seed,
            num_prompt_tokens=new.num_prompt_tokens,
            token_ids=array("i", new.token_ids),
            num_computed=new.num_computed_tokens,
            block_ids=[],
            edits=None,
            num_prompt_logprobs=new.num_prompt_logprobs,
        )
        self._append_blocks(slot, new.block_ids)
        if LogitEdits.needed(params):
            known = self.token_ids(slot)
            state.edits = LogitEdits(params, known, new.num_prompt_tokens, self._vocab_size, self._eos_token_ids)
        is_greedy = params.temperature < GREEDY_BELOW
        is_bound = params.grammar is not None or params.thinking is not None
        if state.edits is not None or is_bound or not is_greedy:
            self._sampled.add(slot)
        if params.logprobs is not None:
            self._reporting.add(slot)
        if state.wants_prompt_logprobs:
            assert new.num_computed_tokens <= new.num_prompt_logprobs, "cached positions cannot be scored"
            self._scored.add(slot)
        if params.pooling is not None:
            state.pooler = Pooler(params.pooling, new.num_prompt_tokens)
            assert not (state.pooler.takes_all and new.num_computed_tokens), "cached positions cannot be pooled"
            self._pooled.add(slot)

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        known = self.state(slot).block_ids
        assert len(known) + len(block_ids) <= self._block_tables.max_blocks, "more blocks than the longest text needs"
        assert all(0 <= block_id < self._num_blocks for block_id in block_ids)
        self._block_tables.write(slot, len(known), block_ids)
        known.extend(block_ids)

    # ----------------------------------------------------------------------------------------------------- reading

    def state(self, slot: int) -> SlotState:
        state = self._states[slot]
        assert state is not None, f"slot {slot} is free"
        return state

    def token_ids(self, slot: int) -> np.ndarray:
        """A copy: all tokens of a sequence so far."""
        return np.array(self.state(slot).token_ids, np.int32)

    def num_computed(self, slot: int) -> int:
        return self.state(slot).num_computed

    @property
    def sampled_slots(self) -> set[int]:
        """Slots whose next token may be another than the model's most likely one."""
        return self._sampled

    @property
    def reporting_slots(self) -> set[int]:
        """Slots that want the log probabilities of their tokens."""
        return self._reporting

    @property
    def scored_slots(self) -> set[int]:
        """Slots whose prompt log probabilities are not all delivered."""
        return self._scored

    def rows(self, plan: StepPlan) -> Rows:
        """The plan's rows, checked against what the slots hold."""
        assert len(set(plan.slots)) == len(plan.slots), "a slot is scheduled twice"
        states: list[SlotState] = []
        for slot, num_tokens, samples in zip(plan.slots, plan.num_tokens, plan.samples, strict=True):
            state = self._states[slot]
            assert state is not None, "a free slot is scheduled"
            end, known = state.num_computed + num_tokens, len(state.token_ids)
            assert num_tokens > 0
            assert end <= known, "more tokens are scheduled than are known"
            assert end == known or not samples, "a token is sampled before all known ones are computed"
            assert end <= len(state.block_ids) * self._block_size, "tokens are scheduled without blocks"
            states.append(state)
        sampling = plan.samples
        if self._pooled:
            sampling = [each and slot not in self._pooled for slot, each in zip(plan.slots, sampling, strict=True)]
        return Rows(plan.slots, states, plan.num_tokens, sampling)

    def inputs(self, rows: Rows) -> tuple[StepInputs, list[PromptRows], list[PooledRows]]:
        """One pass as arrays. The sampling rows' logits come first, in the order of `rows`, then those of prompts.
        Hidden states are wanted only for rows that are pooled."""
        size = self._block_size
        token_ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        query_starts = [0]
        context_lens: list[int] = []
        for state, num_tokens in zip(rows.states, rows.num_tokens, strict=True):
            start, block_ids = state.num_computed, state.block_ids
            end = start + num_tokens
            if num_tokens == 1:
                token_ids.append(state.token_ids[start])
                positions.append(start)
                kv_slots.append(block_ids[start // size] * size + start % size)
            else:
                token_ids.extend(state.token_ids[start:end])
                positions.extend(range(start, end))
                kv_slots.extend([block_ids[p // size] * size + p % size for p in range(start, end)])
            query_starts.append(query_starts[-1] + num_tokens)
            context_lens.append(end)
        logit_rows = [stop - 1 for stop, samples in zip(query_starts[1:], rows.samples, strict=True) if samples]
        prompt_rows = self._prompt_rows(rows, query_starts, logit_rows) if self._scored else []
        hidden_rows: list[int] = []
        pooled_rows = self._pooled_rows(rows, query_starts, hidden_rows) if self._pooled else []
        inputs = StepInputs(
            token_ids_T=np.array(token_ids, np.int32),
            positions_T=np.array(positions, np.int32),
            kv_slots_T=np.array(kv_slots, np.int64),
            query_starts=np.array(query_starts, np.int32),
            context_lens_S=np.array(context_lens, np.int32),
            block_tables_SB=self._block_tables.rows(rows.slots, -(-max(context_lens) // size)),
            logit_rows_R=np.array(logit_rows, np.int32),
            hidden_rows_U=np.array(hidden_rows, np.int32) if hidden_rows else None,
        )
        return inputs, prompt_rows, pooled_rows

    def _prompt_rows(self, rows: Rows, query_starts: list[int], logit_rows: list[int]) -> list[PromptRows]:
        """The logits at position p - 1 score prompt token p; those that an earlier life delivered are left out. Adds
        what it wants to `logit_rows`."""
        found: list[PromptRows] = []
        for slot, state, num_tokens, first_index in zip(
            rows.slots, rows.states, rows.num_tokens, query_starts[:-1], strict=True
        ):
            if slot not in self._scored:
                continue
            start = state.num_computed
            first = max(start, state.num_prompt_logprobs)
            stop = min(start + num_tokens, state.num_prompt_tokens - 1)
            if first < stop:
                found.append(PromptRows(slot, len(logit_rows), stop - first, first + 1))
                logit_rows.extend(range(first_index + first - start, first_index + stop - start))
        return found

    def _pooled_rows(self, rows: Rows, query_starts: list[int], hidden_rows: list[int]) -> list[PooledRows]:
        """Adds what it wants to `hidden_rows`."""
        found: list[PooledRows] = []
        for slot, state, num_tokens, stop in zip(
            rows.slots, rows.states, rows.num_tokens, query_starts[1:], strict=True
        ):
            if state.pooler is None:
                continue
            end = state.num_computed + num_tokens
            if num_rows := state.pooler.num_wanted(state.num_computed, end):
                is_last = end == state.num_prompt_tokens
                found.append(PooledRows(slot, len(hidden_rows), num_rows, is_last))
                hidden_rows.extend(range(stop - num_rows, stop))
        return found

    def sampling_rows(self, slots: list[int]) -> SamplingRows:
        """How these slots sample their next token."""
        states = [self.state(slot) for slot in slots]
        return SamplingRows(
            params=[state.params for state in states],
            seeds=[state.seed for state in states],
            positions=[len(state.token_ids) for state in states],
            edits={
                i: (state.edits, self.token_ids(slot))
                for i, (slot, state) in enumerate(zip(slots, states, strict=True))
                if state.edits is not None
            },
        )

    # ---------------------------------------------------------------------------------------------------- progress

    def advance(self, rows: Rows) -> None:
        """The pass has computed these rows."""
        for state, num_tokens in zip(rows.states, rows.num_tokens, strict=True):
            state.num_computed += num_tokens

    def append(self, slots: list[int], token_ids: list[int]) -> None:
        """Each of these slots got one more token."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            state = self.state(slot)
            state.token_ids.append(token_id)
            if state.edits is not None:
                state.edits.append(token_id)

    def delivered(self, slot: int, num_rows: int) -> None:
        """That many more rows of a slot's prompt log probabilities are in a result."""
        state = self.state(slot)
        state.num_prompt_logprobs += num_rows
        if not state.wants_prompt_logprobs:
            self._scored.discard(slot)
