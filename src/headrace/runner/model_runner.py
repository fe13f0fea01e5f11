"""Runs step plans on one rank: batch differences, forward pass, log probabilities, sampling.

An executor owns one and calls `execute` from one thread. Policy (who runs, when a sequence ends, which blocks it has)
is the engine's; the arithmetic of the model is the backend's. A sequence that fails is named in the result's errors
and the others go on; whatever raises here is a bug and ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from headrace.kernels.ops import Backend
from headrace.runner import logprobs, sampler
from headrace.runner.batch import PersistentBatch, PromptRows, Rows
from headrace.transport.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from headrace.models import LoadedModel

_PROMPT_LOGITS_BYTES = 64 * 1024 * 1024
"""Logits that prompt log probabilities may take in one forward pass; a longer chunk is computed in several."""


class ModelRunner:
    """A model, its KV memory and the persistent batch."""

    def __init__(
        self, model: LoadedModel, backend: Backend, *, num_blocks: int, block_size: int, max_num_seqs: int
    ) -> None:
        """Allocates the KV memory."""
        backend.allocate_kv(model.kv_spec, num_blocks, block_size)
        self._backend = backend
        self._model = model.decoder
        self._max_prompt_rows = max(1, _PROMPT_LOGITS_BYTES // (4 * model.vocab_size))
        self._batch = PersistentBatch(
            max_num_seqs=max_num_seqs,
            max_tokens=min(model.max_model_len, num_blocks * block_size),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end; blocks. After an exception the runner's state is undefined."""
        self._batch.apply(plan)
        result = StepResult()
        if plan.slots:
            for rows in self._passes(self._batch.rows(plan)):
                self._run(rows, result)
        return result

    def _passes(self, rows: Rows) -> Iterator[Rows]:
        """One pass, nearly always. Long chunks whose every position is scored first compute their front alone."""
        scored = [i for i, slot in enumerate(rows.slots.tolist()) if slot in self._batch.scored_slots]
        budget = self._max_prompt_rows
        if scored and rows.num_tokens[scored].sum() > budget:
            num_tokens = rows.num_tokens.copy()
            for i in scored:
                kept = min(int(num_tokens[i]), max(1, budget))
                budget -= kept
                while num_tokens[i] > kept:
                    front = min(int(num_tokens[i]) - kept, self._max_prompt_rows)
                    num_tokens[i] -= front
                    yield Rows(rows.slots[i : i + 1], np.array([front]), np.array([False]))
            rows = Rows(rows.slots, num_tokens, rows.samples)
        yield rows

    def _run(self, rows: Rows, result: StepResult) -> None:
        inputs, prompt_rows = self._batch.inputs(rows)
        logits = np.ascontiguousarray(self._backend.run(self._model, inputs), np.float32)
        self._batch.advance(rows)
        for prompt in prompt_rows:
            self._score_prompt(prompt, logits, result)
        slots = rows.slots[rows.samples]
        if slots.shape[0]:
            self._sample(slots, logits[: slots.shape[0]], result)

    def _sample(self, slots: np.ndarray, logits: np.ndarray, result: StepResult) -> None:
        best, finite = self._backend.best_tokens(logits)
        token_ids, errors = sampler.sample(logits, self._batch.sampling_rows(slots), best, finite)
        for row, message in errors.items():
            result.errors.setdefault(int(slots[row]), message)
        if result.errors:
            good = np.array([slot not in result.errors for slot in slots.tolist()])
            slots, token_ids, logits = slots[good], token_ids[good], logits[good]
        self._batch.append(slots, token_ids)
        result.slots = slots.tolist()
        result.token_ids = token_ids.tolist()
        for row, slot in enumerate(result.slots):
            num_top = self._batch.state(slot).params.logprobs
            if num_top is not None:
                each = slice(row, row + 1)
                result.logprobs[slot] = logprobs.score(logits[each], token_ids[each], num_top)

    def _score_prompt(self, prompt: PromptRows, logits: np.ndarray, result: StepResult) -> None:
        slot, num_rows = prompt.slot, prompt.num_rows
        if slot in result.errors:
            return
        chunk = logits[prompt.first_row : prompt.first_row + num_rows]
        if not self._backend.best_tokens(chunk)[1].all():
            result.errors[slot] = sampler.NOT_FINITE
            result.prompt_logprobs.pop(slot, None)
            return
        num_top = self._batch.state(slot).params.prompt_logprobs
        assert num_top is not None
        token_ids = self._batch.token_ids(slot)[prompt.first_token : prompt.first_token + num_rows]
        rows = logprobs.score(chunk, token_ids, num_top)
        before = result.prompt_logprobs.get(slot)
        result.prompt_logprobs[slot] = rows if before is None else before + rows
        self._batch.delivered(slot, num_rows)
