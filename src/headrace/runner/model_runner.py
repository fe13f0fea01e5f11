"""Runs step plans on one rank: batch differences, forward pass, log probabilities, sampling.

An executor owns one and calls `execute` from one thread. Policy (who runs, when a sequence ends, which blocks it has)
is the engine's; the arithmetic of the model is the backend's. A sequence that fails is named in the result's errors
and the others go on; whatever raises here is a bug and ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

import numpy as np

from headrace.grammar import GrammarCompiler
from headrace.kernels.ops import Backend, KVSpec, Model
from headrace.runner import logprobs, sampler
from headrace.runner.batch import PersistentBatch, PromptRows, Rows
from headrace.runner.constraints import Constraints
from headrace.runner.pooling import PooledRows
from headrace.transport.plan import StepPlan, StepResult

NOT_FINITE_STATES = "the model gave hidden states that are not finite"
_PROMPT_LOGITS_BYTES = 64 * 1024 * 1024
"""Logits that prompt log probabilities may take in one forward pass; a longer chunk is computed in several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a runner must know of a model whose weights come and go."""

    kv_spec: KVSpec
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0


class ModelRunner:
    """A model, its KV memory and the persistent batch. `use` gives it the model's weights."""

    def __init__(
        self,
        model: ModelShape,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Allocates the KV memory."""
        self._constraints = Constraints(grammars, model.vocab_size)
        self._kv_shape = model.kv_spec, num_blocks, block_size
        self._has_kv = False
        self._backend = backend
        self._draw = backend.draw or sampler.draw
        self._model: Model | None = None
        self.restore_kv()
        self._max_prompt_rows = max(1, _PROMPT_LOGITS_BYTES // (4 * model.vocab_size))
        self._batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_tokens=min(model.max_model_len, num_blocks * block_size),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def use(self, model: Model | None) -> None:
        """Other weights from the next step on; None lets go of the ones in use."""
        self._model = model

    def free_kv(self) -> None:
        """Gives the KV memory back. The batch must hold nothing that was computed."""
        if self._has_kv:
            self._backend.free_kv()
            self._has_kv = False

    def restore_kv(self) -> None:
        if not self._has_kv:
            self._backend.allocate_kv(*self._kv_shape)
            self._has_kv = True

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end; blocks. After an exception the runner's state is undefined."""
        self._batch.apply(plan)
        self._constraints.apply(plan)
        result = StepResult()
        if plan.slots:
            rows = self._batch.rows(plan)
            for each in self._passes(rows) if self._batch.scored_slots else (rows,):
                self._run(each, result)
        return result

    def _passes(self, rows: Rows) -> Iterator[Rows]:
        """One pass, nearly always. Long chunks whose every position is scored first compute their front alone."""
        scored = [i for i, slot in enumerate(rows.slots) if slot in self._batch.scored_slots]
        budget = self._max_prompt_rows
        if scored and sum(rows.num_tokens[i] for i in scored) > budget:
            num_tokens = rows.num_tokens.copy()
            for i in scored:
                kept = min(num_tokens[i], max(1, budget))
                budget -= kept
                while num_tokens[i] > kept:
                    front = min(num_tokens[i] - kept, self._max_prompt_rows)
                    num_tokens[i] -= front
                    yield Rows(rows.slots[i : i + 1], rows.states[i : i + 1], [front], [False])
            rows = Rows(rows.slots, rows.states, num_tokens, rows.samples)
        yield rows

    def _run(self, rows: Rows, result: StepResult) -> None:
        inputs, prompt_rows, pooled_rows = self._batch.inputs(rows)
        assert self._model is not None, "the engine makes no step without weights"
        outputs = self._backend.run(self._model, inputs)
        self._batch.advance(rows)
        for pooled in pooled_rows:
            self._pool(pooled, outputs.hidden_UD, result)
        logits, best, finite = outputs.logits_RV, outputs.best_R.tolist(), outputs.finite_R.tolist()
        if not best:
            return
        for prompt in prompt_rows:
            self._score_prompt(prompt, logits, finite, result)
        slots = list(compress(rows.slots, rows.samples))
        if slots:
            self._sample(slots, logits, best[: len(slots)], finite[: len(slots)], result)

    def _sample(
        self, slots: list[int], logits: np.ndarray, best: list[int], finite: list[bool], result: StepResult
    ) -> None:
        token_ids = best
        if self._batch.sampled_slots or not all(finite):
            sampling = self._batch.sampling_rows(slots)
            sampling.masks.update(self._constraints.masks(slots))
            token_ids, errors = sampler.sample(logits, sampling, best, finite, self._draw)
            for row, message in errors.items():
                result.errors.setdefault(slots[row], message)
        if result.errors:
            good = [slot not in result.errors for slot in slots]
            logits = logits[: len(slots)][good]
            slots, token_ids = list(compress(slots, good)), list(compress(token_ids, good))
        self._batch.append(slots, token_ids)
        self._constraints.append(slots, token_ids)
        result.slots = slots
        result.token_ids = token_ids
        if not self._batch.reporting_slots:
            return
        for row, slot in enumerate(slots):
            num_top = self._batch.state(slot).params.logprobs
            if num_top is not None:
                each = slice(row, row + 1)
                result.logprobs[slot] = logprobs.score(logits[each], np.array(token_ids[each]), num_top)

    def _pool(self, pooled: PooledRows, hidden_UD: np.ndarray | None, result: StepResult) -> None:
        pooler = self._batch.state(pooled.slot).pooler
        assert pooler is not None, "the batch has named it"
        assert hidden_UD is not None, "the backend was asked for it"
        pooler.add(hidden_UD[pooled.first_row : pooled.first_row + pooled.num_rows])
        if not pooled.is_last:
            return
        vector = pooler.vector()
        if np.isfinite(vector).all():
            result.embeddings[pooled.slot] = vector.tobytes()
        else:
            result.errors[pooled.slot] = NOT_FINITE_STATES

    def _score_prompt(self, prompt: PromptRows, logits: np.ndarray, finite: list[bool], result: StepResult) -> None:
        slot, num_rows = prompt.slot, prompt.num_rows
        if slot in result.errors:
            return
        scored = slice(prompt.first_row, prompt.first_row + num_rows)
        if not all(finite[scored]):
            result.errors[slot] = sampler.NOT_FINITE
            result.prompt_logprobs.pop(slot, None)
            return
        num_top = self._batch.state(slot).params.prompt_logprobs
        assert num_top is not None
        token_ids = self._batch.token_ids(slot)[prompt.first_token : prompt.first_token + num_rows]
        rows = logprobs.score(logits[scored], token_ids, num_top)
        before = result.prompt_logprobs.get(slot)
        result.prompt_logprobs[slot] = rows if before is None else before + rows
        self._batch.delivered(slot, num_rows)
