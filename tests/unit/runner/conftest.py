"""Fakes for the runner's tests: a backend whose logits are a function of the token history read from its paged memory,
so that a wrong slot, position or block table changes the output; and a driver that stands in for the engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headrace.kernels.ops import KVSpec, StepInputs, StepOutputs
from headrace.runner import ModelRunner, ModelShape
from headrace.transport.plan import NewSequence, StepPlan, StepResult
from headrace.types import LogprobRows, SamplingParams

VOCAB_SIZE = 61
POISON = 60  # a history that holds this token has logits that are not finite
BLOCK_SIZE = 4
HIDDEN_SIZE = 50


def history_logits(history: np.ndarray) -> np.ndarray:
    """The fake model: float32 logits after a history of token ids."""
    seed = zlib.crc32(np.ascontiguousarray(history, np.int32).tobytes())
    row = (np.random.default_rng(seed).standard_normal(VOCAB_SIZE) * 2).astype(np.float32)
    if POISON in history:
        row[seed % VOCAB_SIZE] = (np.nan, np.inf, -np.inf)[seed % 3]
    row[POISON] = -30.0  # never chosen by chance
    return row


class HistoryBackend:
    """A `Backend` whose KV memory holds token ids."""

    name = "history"
    draw = None

    def kv_bytes_per_token(self, spec: KVSpec) -> int:
        return spec.num_vectors_per_token() * spec.head_dim * 4

    def __init__(self) -> None:
        self.max_logit_rows = 0
        self.num_runs = 0

    def allocate_kv(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._memory = np.full(num_blocks * block_size, -1, np.int32)

    def run(self, model: Any, inputs: StepInputs) -> StepOutputs:
        self.num_runs += 1
        self.max_logit_rows = max(self.max_logit_rows, inputs.logit_rows_R.shape[0])
        assert np.unique(inputs.kv_slots_T).shape == inputs.kv_slots_T.shape, "two tokens in one place"
        self._memory[inputs.kv_slots_T] = inputs.token_ids_T
        owner = np.searchsorted(inputs.query_starts, inputs.logit_rows_R, side="right") - 1
        rows = [self._history(inputs, int(s), int(t)) for s, t in zip(owner, inputs.logit_rows_R, strict=True)]
        logits = np.array([history_logits(row) for row in rows], np.float32).reshape(-1, VOCAB_SIZE)
        return StepOutputs(logits, logits.argmax(axis=1), np.isfinite(logits).all(axis=1), self._hidden(inputs))

    def _hidden(self, inputs: StepInputs) -> np.ndarray | None:
        """The first numbers of the logits."""
        if inputs.hidden_rows_U is None:
            return None
        owner = np.searchsorted(inputs.query_starts, inputs.hidden_rows_U, side="right") - 1
        rows = [self._history(inputs, int(s), int(t)) for s, t in zip(owner, inputs.hidden_rows_U, strict=True)]
        return np.array([history_logits(row)[:HIDDEN_SIZE] for row in rows])

    def _history(self, inputs: StepInputs, sequence: int, row: int) -> np.ndarray:
        position = int(inputs.positions_T[row])
        last = int(inputs.query_starts[sequence + 1]) - 1
        assert inputs.context_lens_S[sequence] == inputs.positions_T[last] + 1
        block, offset = np.divmod(np.arange(position + 1), self._block_size)
        return self._memory[inputs.block_tables_SB[sequence, block].astype(np.int64) * self._block_size + offset]


@dataclass
class Running:
    """What the driver remembers of a sequence."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    error: str | None = None
    is_entered: bool = False
    embedding: bytes | None = None

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Makes plans and applies results, as an engine without policy would."""

    def __init__(self, max_num_seqs: int = 20, num_blocks: int = 400, grammars: Any = None) -> None:
        self.backend = HistoryBackend()
        self.runner = ModelRunner(
            ModelShape(kv_spec=KVSpec(1, 1, 1), vocab_size=VOCAB_SIZE, max_model_len=512, eos_token_ids=(1,)),
            self.backend,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            grammars=grammars,
        )
        self.runner.use(object())
        # Falling ids from a pool: tables are never consecutive, and blocks are used again with old contents in them.
        self._free = list(range(num_blocks))
        self._released: list[int] = []
        self._slots = list(range(max_num_seqs))
        self.running: list[Running] = []
        self.num_steps = 0

    def add(self, prompt: list[int], params: SamplingParams, seed: int = 0) -> Running:
        sequence = Running(self._slots.pop(), list(prompt), len(prompt), params, seed)
        self.running.append(sequence)
        return sequence

    def remove(self, sequence: Running) -> None:
        self.running.remove(sequence)
        if sequence.is_entered:
            self._released.append(sequence.slot)
        self._free += sequence.blocks
        self._slots.insert(0, sequence.slot)
        sequence.blocks = []

    def preempt(self, sequence: Running) -> None:
        """Leaves, and comes back with its output in another slot."""
        self.remove(sequence)
        sequence.slot = self._slots.pop()
        sequence.num_computed, sequence.is_entered = 0, False
        self.running.append(sequence)

    def step(self, chunk: int | None = None, only: list[Running] | None = None) -> StepResult:
        """Every sequence (or `only` these) computes what it lacks, at most `chunk` tokens, and samples if complete."""
        scheduled = [s for s in (self.running if only is None else only) if s.error is None]
        new, counts, new_blocks, samples = [], [], [], []
        for s in scheduled:
            num_tokens = min(len(s.token_ids) - s.num_computed, chunk or len(s.token_ids))
            end = s.num_computed + num_tokens
            added = [self._free.pop() for _ in range(-(-end // BLOCK_SIZE) - len(s.blocks))]
            s.blocks += added
            if not s.is_entered:
                delivered = s.prompt_logprobs.num_rows if s.prompt_logprobs else 0
                new.append(self._new(s, delivered))
                s.is_entered, added = True, []
            counts.append(num_tokens)
            new_blocks.append(added)
            samples.append(end == len(s.token_ids))
            s.num_computed = end
        plan = StepPlan(
            step=self.num_steps, released=self._released, new=new, slots=[s.slot for s in scheduled],
            num_tokens=counts, new_block_ids=new_blocks, samples=samples,
        )  # fmt: skip
        self.num_steps, self._released = self.num_steps + 1, []
        result = self.runner.execute(plan)
        assert result.slots == [
            s.slot
            for s, sampled in zip(scheduled, samples, strict=True)
            if sampled and s.slot not in result.errors and s.params.pooling is None
        ]
        self._take(result, {s.slot: s for s in scheduled})
        return result

    def generate(self, num_tokens: int, chunk: int | None = None) -> None:
        while any(s.error is None and len(s.output) < num_tokens for s in self.running):
            self.step(chunk, [s for s in self.running if len(s.output) < num_tokens])

    @staticmethod
    def _new(s: Running, num_prompt_logprobs: int) -> NewSequence:
        return NewSequence(
            slot=s.slot, token_ids=list(s.token_ids), num_prompt_tokens=s.num_prompt_tokens, num_computed_tokens=0,
            block_ids=list(s.blocks), params=s.params, seed=s.seed, num_prompt_logprobs=num_prompt_logprobs,
        )  # fmt: skip

    @staticmethod
    def _take(result: StepResult, by_slot: dict[int, Running]) -> None:
        for slot, token_id in zip(result.slots, result.token_ids, strict=True):
            by_slot[slot].token_ids.append(token_id)
        for slot, rows in result.logprobs.items():
            old = by_slot[slot].logprobs
            by_slot[slot].logprobs = rows if old is None else old + rows
        for slot, rows in result.prompt_logprobs.items():
            old = by_slot[slot].prompt_logprobs
            by_slot[slot].prompt_logprobs = rows if old is None else old + rows
        for slot, embedding in result.embeddings.items():
            assert by_slot[slot].embedding is None, "it comes once"
            by_slot[slot].embedding = embedding
        for slot, message in result.errors.items():
            by_slot[slot].error = message


@pytest.fixture(scope="session")
def make_driver() -> Callable[..., Driver]:
    return Driver


@pytest.fixture(scope="session")
def fake_logits() -> Callable[[np.ndarray], np.ndarray]:
    return history_logits
