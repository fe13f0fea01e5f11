"""A fake executor for tests of the engine: it checks each plan and knows what KV it wrote where.

Its model is a hash chain: the KV of a position stands for all tokens up to it, and the next token follows from the last
one's. A block that was reused, shared or evicted wrongly is therefore caught on the spot, and a sequence's output is a
function of its own tokens alone (`expected_output`). `EchoExecutor` is the one that serves; this one only judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.executor.base import ModelInfo, Stage
from headrace.testing.echo_weights import EchoWeights
from headrace.transport.plan import NewSequence, StepPlan, StepResult
from headrace.types import LogprobRows


def next_state(state: int, token_id: int, epoch: int) -> int:
    return hash((state, token_id, epoch))


def expected_output(
    prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int], vocab_size: int, min_tokens: int = 0
) -> list[int]:
    """What a sequence generates, alone and undisturbed, with weights epoch 0."""
    state = 0
    for token_id in prompt:
        state = next_state(state, token_id, 0)
    output: list[int] = []
    while len(output) < max_tokens:
        token_id = state % vocab_size
        output.append(token_id)
        if token_id in stop_ids and len(output) > min_tokens:
            break
        state = next_state(state, token_id, 0)
    return output


@dataclass
class _Slot:
    new: NewSequence
    token_ids: list[int]
    block_ids: list[int]
    states: list[int] = field(default_factory=list)  # what the KV of its computed positions must be
    num_sent: int = 0  # rows of prompt logprobs


class StrictExecutor(EchoWeights):
    """Implements `Executor`. `fail_token_id`: whoever would sample it fails alone. `plans` keeps every plan."""

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        max_model_len: int = 64,
        eos_token_ids: tuple[int, ...] = (0,),
        fail_token_id: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.info = ModelInfo("strict", vocab_size, max_model_len, eos_token_ids, "strict", kv_bytes_per_token=64)
        self.epoch = 0
        self.plans: list[StepPlan] = []
        self._fail_token_id = fail_token_id
        self._budget = max_num_batched_tokens
        self._slots: dict[int, _Slot] = {}
        self._kv: dict[tuple[int, int], int] = {}
        self._num_blocks = self._block_size = self._max_num_seqs = 0

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        assert self._num_blocks == 0, "allocated twice"
        self._num_blocks, self._block_size, self._max_num_seqs = num_blocks, block_size, max_num_seqs

    def close(self) -> None:
        self._slots.clear()

    def swap(self, stage: Stage) -> None:
        super().swap(stage)
        self.epoch += 1

    def free_kv(self) -> None:
        super().free_kv()
        self._kv.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        self.check_can_step()
        assert plan.step == len(self.plans), "steps are numbered without gaps"
        self.plans.append(plan)
        assert self._budget is None or plan.num_batched_tokens <= self._budget, "over the token budget"
        for slot in plan.released:
            del self._slots[slot]
        decoding = {slot for slot, it in self._slots.items() if len(it.token_ids) - len(it.states) == 1}
        for new in plan.new:
            self._enter(new)
        rows = (plan.slots, plan.num_tokens, plan.new_block_ids, plan.samples)
        assert len({len(column) for column in rows}) == 1, "columns of different lengths"
        assert len(set(plan.slots)) == len(plan.slots), "a slot computes twice in a step"
        assert decoding <= set(plan.slots), "a decode had to wait"
        assert {new.slot for new in plan.new} <= set(plan.slots), "a sequence entered and computes nothing"
        result = StepResult()
        for slot, num_tokens, new_block_ids, samples in zip(*rows, strict=True):
            self._compute(slot, num_tokens, new_block_ids, samples, result)
        return result

    def _enter(self, new: NewSequence) -> None:
        assert 0 <= new.slot < self._max_num_seqs
        assert new.slot not in self._slots, "a new sequence in a slot that is in use"
        assert 0 < new.num_prompt_tokens <= len(new.token_ids)
        assert 0 <= new.num_computed_tokens < len(new.token_ids), "at least the last token is to be computed"
        wants_rows = new.params.prompt_logprobs is not None and new.num_prompt_logprobs < new.num_prompt_tokens - 1
        assert not wants_rows or new.num_computed_tokens <= new.num_prompt_logprobs, "cached positions cannot be scored"
        slot = _Slot(new, list(new.token_ids), list(new.block_ids), num_sent=new.num_prompt_logprobs)
        self._slots[new.slot] = slot
        state = 0
        for position in range(new.num_computed_tokens):
            state = next_state(state, slot.token_ids[position], self.epoch)
            slot.states.append(state)
        self._check(slot)

    def _compute(
        self, slot_id: int, num_tokens: int, new_block_ids: list[int], samples: bool, result: StepResult
    ) -> None:
        slot = self._slots[slot_id]
        slot.block_ids.extend(new_block_ids)
        start = len(slot.states)
        stop = start + num_tokens
        assert num_tokens >= 1
        assert stop <= len(slot.token_ids), "computes more tokens than there are"
        self._check(slot)
        for position in range(start, stop):
            state = next_state(slot.states[-1] if slot.states else 0, slot.token_ids[position], self.epoch)
            self._write(slot, position, state)
            slot.states.append(state)
        assert samples == (stop == len(slot.token_ids)), "samples exactly when all tokens are computed"
        self._score_prompt(slot_id, slot, start, stop, result)
        if samples:
            token_id = slot.states[-1] % self.info.vocab_size
            if token_id == self._fail_token_id:
                result.errors[slot_id] = "logits are not finite"
                return
            slot.token_ids.append(token_id)
            result.slots.append(slot_id)
            result.token_ids.append(token_id)
            if slot.new.params.logprobs is not None:
                result.logprobs[slot_id] = _rows([token_id])

    def _score_prompt(self, slot_id: int, slot: _Slot, start: int, stop: int, result: StepResult) -> None:
        if slot.new.params.prompt_logprobs is None:
            return
        last = min(stop, slot.new.num_prompt_tokens - 1)
        first = max(start, slot.num_sent)
        if first < last:
            assert first == slot.num_sent, "a row of prompt logprobs is skipped"
            result.prompt_logprobs[slot_id] = _rows(slot.token_ids[first + 1 : last + 1])
            slot.num_sent = last

    def _check(self, slot: _Slot) -> None:
        """Its block table is sane, and nobody has touched the KV of its computed positions."""
        assert len(set(slot.block_ids)) == len(slot.block_ids), "a block stands twice in one table"
        assert all(0 <= block < self._num_blocks for block in slot.block_ids)
        for position, state in enumerate(slot.states):
            assert self._kv.get(self._place(slot, position)) == state, f"the KV of position {position} is another's"

    def _write(self, slot: _Slot, position: int, state: int) -> None:
        block, offset = self._place(slot, position)
        owners = sum(block in other.block_ids for other in self._slots.values())
        assert owners == 1, "writes into a block that another sequence has too"
        self._kv[block, offset] = state

    def _place(self, slot: _Slot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._block_size)
        assert index < len(slot.block_ids), "computes beyond its block table"
        return slot.block_ids[index], offset


def _rows(token_ids: list[int]) -> LogprobRows:
    ids = np.array(token_ids, np.int32)[:, None]
    return LogprobRows.from_arrays(ids, -ids.astype(np.float32), np.ones(len(token_ids), np.int32))
