"""The mock engine's executor: no model; each sequence's output repeats its prompt's tokens in a cycle, and its
embedding counts them.

`headrace serve --mock-engine` uses it to measure the front end, and tests use it to drive the engine's core: it obeys
the same plan semantics as the real one, at a fraction of a microsecond per sequence and step. With `check_plans` it
also follows each plan in a real persistent batch, whose assertions then hold the engine to the rules. It knows no
text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain, compress, cycle
from typing import TYPE_CHECKING

import numpy as np

from headrace.executor.base import ModelInfo
from headrace.testing.echo_weights import EchoWeights
from headrace.transport.plan import NewSequence, StepPlan, StepResult
from headrace.types import ALL_LOGPROBS, LogprobRows

if TYPE_CHECKING:
    from headrace.runner.batch import PersistentBatch


EMBEDDING_SIZE = 16


class EchoExecutor(EchoWeights):
    """Implements `Executor`."""

    def __init__(  # budget: every parameter is a knob of its own for tests
        self,
        *,
        name: str = "echo",
        vocab_size: int = 1 << 18,
        max_model_len: int = 32768,
        eos_token_ids: tuple[int, ...] = (),
        kv_bytes_per_token: int = 4096,
        step_delay_s: float = 0.0,
        gate: threading.Event | None = None,
        fail_at_step: int | None = None,
        fail_token_id: int | None = None,
        check_plans: bool = False,
    ) -> None:
        """`gate`: a step waits until it is set. `fail_at_step`: the execute call (from 1) that raises RuntimeError.
        `fail_token_id`: a sequence that would sample this token fails alone instead."""
        super().__init__()
        self._info = ModelInfo(
            name, vocab_size, max_model_len, eos_token_ids, "echo", kv_bytes_per_token, hidden_size=EMBEDDING_SIZE
        )
        self._step_delay_s = step_delay_s
        self._gate = gate
        self._fail_at_step = fail_at_step
        self._fail_token_id = fail_token_id
        self._check_plans = check_plans
        self._shadow: PersistentBatch | None = None
        self._outputs: list[Iterator[int] | None] = []
        self._num_top: dict[int, int] = {}  # slots that want log probabilities
        self._prompts: dict[int, _PromptCursor] = {}  # slots that want the prompt's
        self._embeddings: dict[int, bytes] = {}  # of slots that want one, and no token
        self.num_steps = 0

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._outputs = [None] * max_num_seqs
        if self._check_plans:
            from headrace.runner.batch import PersistentBatch

            self._shadow = PersistentBatch(
                max_num_seqs=max_num_seqs,
                max_tokens=min(self._info.max_model_len, num_blocks * block_size),
                num_blocks=num_blocks,
                block_size=block_size,
                vocab_size=self._info.vocab_size,
            )

    def execute(self, plan: StepPlan) -> StepResult:
        self.check_can_step()
        self._hold()
        for slot in plan.released:
            assert self._outputs[slot] is not None, f"slot {slot} is released but free"
            self._outputs[slot] = None
            self._num_top.pop(slot, None)
            self._prompts.pop(slot, None)
            self._embeddings.pop(slot, None)
        for new in plan.new:
            self._enter(new)
        slots = list(compress(plan.slots, plan.samples))
        outputs, embeddings = self._outputs, {}
        if self._embeddings:
            embeddings = {slot: self._embeddings[slot] for slot in slots if slot in self._embeddings}
            slots = [slot for slot in slots if slot not in embeddings]
        token_ids = [next(outputs[slot]) for slot in slots]  # type: ignore[arg-type]  # a free slot raises: a bug
        result = StepResult(slots=slots, token_ids=token_ids, embeddings=embeddings)
        if self._fail_token_id is not None and self._fail_token_id in token_ids:
            self._fail(result)
        if self._num_top:
            for slot, token_id in zip(result.slots, result.token_ids, strict=True):
                if slot in self._num_top:
                    result.logprobs[slot] = self._logprobs([token_id], self._num_top[slot])
        if self._prompts:
            self._score_prompts(plan, result)
        if self._shadow is not None:
            _follow(self._shadow, plan, result)
        return result

    def close(self) -> None:
        if self._gate is not None:
            self._gate.set()

    def _hold(self) -> None:
        self.num_steps += 1
        if self._gate is not None:
            self._gate.wait()
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        if self.num_steps == self._fail_at_step:
            raise RuntimeError(f"injected failure at step {self.num_steps}")

    def _enter(self, new: NewSequence) -> None:
        assert self._outputs[new.slot] is None, f"slot {new.slot} is given away but in use"
        prompt = new.token_ids[: new.num_prompt_tokens]
        # A preempted sequence brings its output along and goes on where it was in the cycle.
        said = (len(new.token_ids) - len(prompt)) % len(prompt)
        self._outputs[new.slot] = chain(prompt[said:], cycle(prompt)) if said else cycle(prompt)
        if new.params.pooling is not None:
            self._embeddings[new.slot] = echo_embedding(prompt, new.params.pooling).tobytes()
        if new.params.logprobs is not None:
            self._num_top[new.slot] = new.params.logprobs
        if new.params.prompt_logprobs is not None:
            self._prompts[new.slot] = _PromptCursor(
                prompt, new.params.prompt_logprobs, new.num_computed_tokens, new.num_prompt_logprobs
            )

    def _fail(self, result: StepResult) -> None:
        kept = [token_id != self._fail_token_id for token_id in result.token_ids]
        for slot, is_kept in zip(result.slots, kept, strict=True):
            if not is_kept:
                result.errors[slot] = "injected failure"
        result.slots = list(compress(result.slots, kept))
        result.token_ids = list(compress(result.token_ids, kept))

    def _score_prompts(self, plan: StepPlan, result: StepResult) -> None:
        for slot, num_tokens in zip(plan.slots, plan.num_tokens, strict=True):
            cursor = self._prompts.get(slot)
            token_ids = cursor.advance(num_tokens) if cursor is not None else []
            if cursor is not None and token_ids and slot not in result.errors:
                result.prompt_logprobs[slot] = self._logprobs(token_ids, cursor.num_top)

    def _logprobs(self, token_ids: list[int], num_top: int) -> LogprobRows:
        """As if the token itself were the most likely, its successor the next, and so on, each by a factor e^-1."""
        vocab_size = self._info.vocab_size
        num_top = vocab_size if num_top == ALL_LOGPROBS else min(num_top, vocab_size)
        steps = np.concatenate(([0], np.arange(num_top)))
        ids = (np.array(token_ids)[:, None] + steps) % vocab_size
        values = np.broadcast_to(-0.5 - steps, ids.shape)
        return LogprobRows.from_arrays(ids, values, np.ones(len(token_ids)))


def echo_embedding(prompt: list[int], pooling: str) -> np.ndarray:
    """float32: how often tokens fall on each place, modulo the size; of the prompt, or of its last two tokens."""
    pooled = prompt if pooling == "mean" else prompt[-2:]
    return (np.bincount(np.array(pooled) % EMBEDDING_SIZE, minlength=EMBEDDING_SIZE) / len(pooled)).astype(np.float32)


class _PromptCursor:
    """How far a sequence's prompt is computed, and its log probabilities delivered."""

    def __init__(self, prompt: list[int], num_top: int, num_computed: int, num_delivered: int) -> None:
        self._prompt = prompt
        self.num_top = num_top
        self._num_computed = num_computed
        self._num_delivered = num_delivered

    def advance(self, num_tokens: int) -> list[int]:
        """Prompt tokens that this chunk scores: those after each computed position, from the second token on."""
        self._num_computed += num_tokens
        stop = min(self._num_computed, len(self._prompt) - 1)
        scored = self._prompt[self._num_delivered + 1 : stop + 1]
        self._num_delivered += len(scored)
        return scored


def _follow(batch: PersistentBatch, plan: StepPlan, result: StepResult) -> None:
    """Replays a step in a real batch, for its assertions."""
    batch.apply(plan)
    if not plan.slots:
        return
    rows = batch.rows(plan)
    _, prompt_rows, _ = batch.inputs(rows)
    batch.advance(rows)
    for prompt in prompt_rows:
        batch.delivered(prompt.slot, prompt.num_rows)
    batch.append(result.slots, result.token_ids)
