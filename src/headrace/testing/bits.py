"""Runs requests through a real engine core and keeps all that each choice got, to compare it bit for bit.

Promise 3 (same request, same bits) is tested with it: on a tiny model with the ordered reference kernels, and on a real
model with the compiled ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.executor.base import Executor
from headrace.transport.messages import StepOutputs, Submit
from headrace.types import FinishReason, LogprobRows, RequestId, SamplingParams

CLIENT = 1
Bits = tuple[object, ...]


@dataclass(frozen=True)
class Case:
    """One request: prompt and parameters, seed and length set."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Answer:
    """All that one choice got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    finish: int = 0
    embedding: bytes | None = None
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    @property
    def bits(self) -> Bits:
        told = (tuple(self.token_ids), self.logprobs, self.prompt_logprobs, self.finish)
        return told if self.embedding is None else (*told, self.embedding)


class CoreRun:
    """A real core over an executor; asserts its invariants after each step."""

    def __init__(
        self,
        executor: Executor,
        *,
        block_size: int,
        chunk: int = 512,
        num_blocks: int = 400,
        max_num_seqs: int = 16,
        prefix_cache: bool = True,
    ) -> None:
        self.core = EngineCore(
            executor,
            CacheConfig(block_size=block_size, num_kv_blocks=num_blocks, enable_prefix_caching=prefix_cache),
            SchedulerConfig(max_num_seqs=min(max_num_seqs, chunk), max_num_batched_tokens=chunk),
        )
        self.answers: dict[tuple[int, int], Answer] = {}
        self.num_submitted = 0

    def submit(self, case: Case) -> list[Answer]:
        """Answers by choice; they fill up as the engine steps."""
        request_id = self.num_submitted
        self.num_submitted += 1
        answers = [Answer() for _ in range(case.params.n)]
        self.answers |= {(request_id, choice): answer for choice, answer in enumerate(answers)}
        self.core.submit(
            CLIENT,
            Submit(
                request_id=RequestId(request_id), public_id=f"r{request_id}", prompts=(case.prompt,), params=case.params
            ),
        )
        return answers

    def step(self) -> None:
        outputs = self.core.step()
        self.core.check_invariants()
        if CLIENT in outputs:
            self._take(outputs[CLIENT])

    def run(self, cases: list[Case]) -> list[list[Answer]]:
        answers = [self.submit(case) for case in cases]
        self.finish()
        return answers

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
        assert all(a.finish in (FinishReason.STOP, FinishReason.LENGTH) for a in self.answers.values())

    def _take(self, outputs: StepOutputs) -> None:
        start = 0
        keys = list(zip(outputs.request_ids, outputs.choices, strict=True))
        for key, num_tokens, finished in zip(keys, outputs.num_tokens, outputs.finished, strict=True):
            answer = self.answers[key]
            answer.token_ids += outputs.token_ids[start : start + num_tokens]
            answer.finish = finished or answer.finish
            start += num_tokens
        for detail in outputs.details:
            answer = self.answers[keys[detail.row]]
            if detail.logprobs is not None:
                answer.logprobs = answer.logprobs + detail.logprobs if answer.logprobs else detail.logprobs
            if detail.prompt_logprobs is not None:
                before = answer.prompt_logprobs
                answer.prompt_logprobs = before + detail.prompt_logprobs if before else detail.prompt_logprobs
            answer.num_preemptions = max(answer.num_preemptions, detail.num_preemptions)
            if detail.embedding is not None:
                answer.embedding = detail.embedding
            if detail.num_cached_tokens is not None:
                answer.num_cached_tokens = detail.num_cached_tokens


def bits(answers: list[list[Answer]]) -> list[list[Bits]]:
    return [[answer.bits for answer in choices] for choices in answers]
