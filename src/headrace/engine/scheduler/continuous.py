"""Continuous batching with chunked prefill over paged KV. The core drives it (`base.py`).

Each step has a token budget. Every decoding sequence gets its one token first, so nobody's prefill delays it; what is
left goes to the prefills under way, in chunks, then to new sequences. There are never more slots than budget, and a
prefill holds a slot: so the decodes leave it at least one token of every step.

Admission takes the blocks of the whole prompt at once, so only decodes can run out of memory; they preempt by
recompute, newest first. A victim heads the queue and needs at least what it gave, so it is not let in again at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.options import SchedulerConfig
from headrace.engine.scheduler.queue import WaitingQueue
from headrace.engine.sequence import NO_SLOT, Sequence, SequenceState
from headrace.kv.hashing import HashChain
from headrace.kv.manager import KVManager
from headrace.transport.plan import NewSequence, StepPlan
from headrace.types import BlockId


class ContinuousScheduler:
    """Owns the queue, the slots and the running sequences."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_num_seqs: int) -> None:
        assert 1 <= max_num_seqs <= config.max_num_batched_tokens, "a decode would have to wait for the budget"
        self._budget = config.max_num_batched_tokens
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._queue = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []  # slots that the workers still hold
        self._scheduled: list[tuple[Sequence, int]] = []
        self._num_preemptions = 0
        self._num_looked_up = 0
        self._num_found = 0

    @property
    def running(self) -> Mapping[int, Sequence]:
        return self._running

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    @property
    def prefix_counts(self) -> tuple[int, int]:
        return self._num_looked_up, self._num_found

    def add(self, seq: Sequence) -> None:
        self._queue.add(seq)

    def remove(self, seq: Sequence, *, is_faulty: bool = False) -> None:
        if seq.slot == NO_SLOT:
            self._queue.remove(seq)
        else:
            self._vacate(seq, forget=is_faulty)

    def preempt_all(self, *, prefills_only: bool = False) -> None:
        for seq in sorted(self._running.values(), key=_newness, reverse=True):
            if not prefills_only or seq.state is SequenceState.PREFILL:
                self._preempt(seq)

    def schedule(self, step: int, now_s: float) -> StepPlan | None:
        assert not self._scheduled, "schedule before the last step was advanced"
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        growing: list[Sequence] = []  # decodes whose next token starts a block
        size = self._kv.block_size
        for seq in self._running.values():
            if seq.num_tokens - seq.num_computed > 1:
                prefills.append(seq)
                continue
            decodes.append(seq)
            table = seq.table
            assert table is not None
            if seq.num_tokens > len(table.block_ids) * size:
                growing.append(seq)

        while len(growing) > self._kv.num_free:
            victim = self._preempt_newest()
            for members in (growing, decodes, prefills):
                if victim in members:
                    members.remove(victim)
        new_blocks: dict[int, list[int]] = {seq.slot: [self._append_block(seq)] for seq in growing}

        batch = [(seq, 1) for seq in decodes]
        budget = self._budget - len(batch)
        for seq in prefills:
            if budget == 0:
                break
            num_tokens = min(seq.num_tokens - seq.num_computed, budget)
            batch.append((seq, num_tokens))
            budget -= num_tokens
        new: list[NewSequence] = []
        self._admit(budget, batch, new, now_s)
        if not batch:
            assert not self._queue, "nothing runs and the head of the queue was not admitted"
            return None
        self._scheduled = batch
        return self._plan(step, batch, new, new_blocks)

    def _plan(
        self,
        step: int,
        batch: list[tuple[Sequence, int]],
        new: list[NewSequence],
        new_blocks: dict[int, list[int]],
    ) -> StepPlan:
        released, self._released = self._released, []
        none: list[int] = []
        return StepPlan(
            step=step,
            released=released,
            new=new,
            slots=[seq.slot for seq, _ in batch],
            num_tokens=[num_tokens for _, num_tokens in batch],
            new_block_ids=[new_blocks.get(seq.slot, none) for seq, _ in batch],
            samples=[seq.num_computed + num_tokens == seq.num_tokens for seq, num_tokens in batch],
        )

    def advance(self) -> list[Sequence]:
        completed: list[Sequence] = []
        size = self._kv.block_size
        for seq, num_tokens in self._scheduled:
            table = seq.table
            if table is None:
                continue  # it failed in this step
            seq.num_computed += num_tokens
            num_full = seq.num_computed // size
            if num_full > table.num_registered and table.is_registering:
                chain = table.chain
                assert chain is not None
                chain.extend(seq.tokens(chain.num_tokens, num_full * size))
                self._kv.register(table, num_full)
            if seq.state is SequenceState.PREFILL and seq.num_computed == seq.num_tokens:
                seq.move(SequenceState.RUNNING)
                completed.append(seq)
        self._scheduled = []
        return completed

    def _admit(self, budget: int, batch: list[tuple[Sequence, int]], new: list[NewSequence], now_s: float) -> None:
        """Lets sequences in, in strict order: the first one that does not fit keeps the others out as well, so that a
        long prompt is not starved by short ones."""
        while budget > 0 and self._free_slots:
            seq = self._queue.peek()
            if seq is None:
                return
            chain = self._chain(seq)
            # Each running sequence may soon need one more block; without spare ones the newcomer would be preempted.
            num_spare = len(self._running)
            table = self._kv.allocate(chain, seq.num_tokens, seq.max_cached_tokens, num_spare)
            if table is None:
                return
            self._queue.pop()
            seq.table = table
            seq.num_computed = table.num_cached_tokens
            seq.slot = self._free_slots.pop()
            self._running[seq.slot] = seq
            seq.move(SequenceState.PREFILL)
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = now_s
                self._count_lookup(seq)
            new.append(self._new_sequence(seq))
            num_tokens = min(seq.num_tokens - seq.num_computed, budget)
            batch.append((seq, num_tokens))
            budget -= num_tokens

    def _count_lookup(self, seq: Sequence) -> None:
        """The prompt's first look-up is the one that counts: later ones find what the request computed itself."""
        assert seq.table is not None
        if seq.group.num_cached_tokens is not None:
            return
        seq.group.num_cached_tokens = seq.table.num_cached_tokens
        if seq.request.is_cacheable and seq.max_cached_tokens > 0:
            self._num_looked_up += seq.num_prompt_tokens
            self._num_found += seq.table.num_cached_tokens

    def _chain(self, seq: Sequence) -> HashChain | None:
        """The hashes of the tokens that a sequence has now; None if it shares its KV with nobody."""
        request = seq.request
        params = seq.params
        if not request.is_cacheable and params.n == 1:
            return None
        chain = seq.chain
        if chain is None or chain.key.weights_epoch != self._kv.weights_epoch:
            salt, private_to = request.submit.cache_salt, None if request.is_cacheable else request.ordinal
            chain = HashChain(self._kv.cache_key(cache_salt=salt, private_to=private_to), self._kv.block_size)
            seq.chain = chain
        if chain.num_tokens + chain.block_size <= seq.num_tokens:
            chain.extend(seq.tokens(chain.num_tokens, seq.num_tokens))
        return chain

    def _new_sequence(self, seq: Sequence) -> NewSequence:
        assert seq.table is not None
        return NewSequence(
            slot=seq.slot,
            token_ids=seq.tokens(0, seq.num_tokens),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.num_computed,
            block_ids=list(seq.table.block_ids),
            params=seq.params,
            seed=seq.seed,
            num_prompt_logprobs=seq.num_prompt_logprobs,
        )

    def _append_block(self, seq: Sequence) -> BlockId:
        assert seq.table is not None
        return self._kv.append(seq.table)

    def _preempt_newest(self) -> Sequence:
        """The victim is the one of the lowest priority, and of these the one that came last."""
        assert len(self._running) > 1, "one sequence alone always fits: intake has checked it"
        victim = max(self._running.values(), key=_newness)
        self._preempt(victim)
        return victim

    def _preempt(self, victim: Sequence) -> None:
        self._vacate(victim, forget=False)
        victim.move(SequenceState.PREEMPTED)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self._queue.add_preempted(victim)

    def _vacate(self, seq: Sequence, *, forget: bool) -> None:
        assert seq.table is not None
        self._kv.release(seq.table, forget=forget)
        seq.table = None
        del self._running[seq.slot]
        self._released.append(seq.slot)
        self._free_slots.append(seq.slot)
        seq.slot = NO_SLOT

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        assert len(self._running) <= self._max_num_seqs
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        assert set(self._free_slots) | self._running.keys() == set(range(self._max_num_seqs)), "a slot is lost"
        assert not self._running.keys() & set(self._free_slots), "a slot in use is free"
        assert len(set(self._released)) == len(self._released), "a slot leaves the workers twice"
        for slot, seq in self._running.items():
            assert seq.slot == slot
            assert seq.state in (SequenceState.PREFILL, SequenceState.RUNNING)
            assert 0 <= seq.num_computed < seq.num_tokens, "a running sequence has nothing to compute"
            assert seq.table is not None
            assert len(seq.table.block_ids) * self._kv.block_size >= seq.num_computed
        self._kv.check_invariants(seq.table for seq in self._running.values() if seq.table is not None)


def _newness(seq: Sequence) -> tuple[int, int, int]:
    return seq.request.submit.priority, seq.request.ordinal, seq.choice
