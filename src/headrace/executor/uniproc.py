"""The executor with one rank: the worker is an object in the engine's own process.

`create_executor` makes it. It loads the model at once, and the batch and KV memory when the engine has decided
their sizes. It holds no policy.
"""

from __future__ import annotations

from pathlib import Path

from headrace.executor.base import ModelInfo
from headrace.kernels import Backend
from headrace.models import load_model
from headrace.runner import ModelRunner
from headrace.transport.plan import StepPlan, StepResult


class UniprocExecutor:
    """Implements `Executor` in the calling thread."""

    def __init__(self, model_path: Path, backend: Backend, name: str | None = None) -> None:
        """Loads the weights; raises `CheckpointError`. `name` replaces the model's own."""
        self._backend = backend
        self._model = load_model(model_path, self._backend)
        self._runner: ModelRunner | None = None
        self._info = ModelInfo(
            name=name or self._model.name,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            backend=self._backend.name,
            kv_bytes_per_token=self._backend.kv_bytes_per_token(self._model.kv_spec),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        assert self._runner is None, "allocate is called once"
        self._runner = ModelRunner(
            self._model, self._backend, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs
        )

    def execute(self, plan: StepPlan) -> StepResult:
        assert self._runner is not None, "allocate comes before the first step"
        return self._runner.execute(plan)

    def close(self) -> None:
        """Lets go of the batch and the runner; the memory goes with the object itself."""
        self._runner = None
