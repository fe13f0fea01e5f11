"""What crosses between the engine's core and its workers: one `StepPlan` down, one `StepResult` up, each step.

A worker holds the persistent batch: a sequence is described once, in full, and named by its slot from then on. A
worker knows nothing of queues, priorities, aborts or preemption: a preempted sequence leaves like a finished one and
comes back as a new one that brings its output tokens along.
"""

from __future__ import annotations

import msgspec

from headrace.types import LogprobRows, SamplingParams


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence enters the persistent batch."""

    slot: int  # row of the persistent batch, in [0, max_num_seqs)
    token_ids: list[int]  # the prompt, and the output so far when it was preempted
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens whose KV already lies in block_ids (prefix cache)
    block_ids: list[int]
    params: SamplingParams
    seed: int
    num_prompt_logprobs: int = 0  # rows of prompt logprobs already delivered before a preemption


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. First the slots in `released` leave, then `new` ones enter, then `slots` compute.

    Row i: slot `slots[i]` computes its next `num_tokens[i]` tokens after `new_block_ids[i]` were appended to its block
    table; it samples one token if `samples[i]` (it has then computed all tokens that it has), or gives its embedding.
    """

    step: int
    released: list[int] = []
    new: list[NewSequence] = []
    slots: list[int] = []
    num_tokens: list[int] = []
    new_block_ids: list[list[int]] = []
    samples: list[bool] = []

    @property
    def num_batched_tokens(self) -> int:
        return sum(self.num_tokens)


class StepResult(msgspec.Struct, kw_only=True):
    """What a step produced. Row i: slot `slots[i]` sampled `token_ids[i]`; the worker has appended it already."""

    slots: list[int] = []
    token_ids: list[int] = []
    logprobs: dict[int, LogprobRows] = {}  # by slot, one row each
    prompt_logprobs: dict[int, LogprobRows] = {}  # by slot, the rows that this step's chunk completed
    embeddings: dict[int, bytes] = {}  # by slot, of prompts that were computed to their end: float32 [D]
    errors: dict[int, str] = {}  # by slot: that sequence alone has failed (its logits were not finite)
