"""What the engine's core runs a step on. The core knows no process, socket or tensor; an executor knows no policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.transport.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of the model."""

    name: str
    vocab_size: int  # rows of the head: valid token ids are [0, vocab_size)
    max_model_len: int  # the model's own limit, in tokens
    eos_token_ids: tuple[int, ...]
    backend: str
    kv_bytes_per_token: int
    weights_version: str = "0"


class Executor(Protocol):
    """Runs step plans in order on one or more ranks. Used by one thread."""

    @property
    def info(self) -> ModelInfo:
        """Known once the constructor has returned: the weights are loaded by then."""
        ...

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        """Reserves KV memory and the persistent batch. Called once, before the first step."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end. A failure of one sequence is in the result; an exception ends the engine."""
        ...

    def close(self) -> None: ...
