"""The executor with one rank: the worker is an object in the engine's own process.

`create_executor` makes it. It loads the model at once, and the batch and KV memory when the engine has decided
their sizes. It holds no policy. With several ranks it is the first of them, inside `multiproc.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from headrace.eplb.layout import ExpertMap
from headrace.executor.base import ModelInfo, Stage
from headrace.executor.weights import RankWeights
from headrace.grammar import CompiledGrammar, GrammarCompiler, GrammarError, Vocabulary
from headrace.kernels import Backend
from headrace.models.shard import Sharding
from headrace.models.stage import WeightStage
from headrace.runner import ModelRunner
from headrace.transport.plan import StepPlan, StepResult
from headrace.types import GrammarSpec

ALONE = Sharding()


class UniprocExecutor:
    """Implements `Executor` in the calling thread."""

    expert_moves = None  # there is nowhere to move them to

    def __init__(
        self,
        model_path: Path,
        backend: Backend,
        name: str | None = None,
        *,
        load_vocabulary: Callable[[], Vocabulary] | None = None,
        num_grammars_kept: int = 128,
        sharding: Sharding = ALONE,
    ) -> None:
        """Loads the weights; raises `CheckpointError` and `ConfigError`. `name` replaces the model's own. Without a
        vocabulary no grammar can be followed."""
        self._backend = backend
        self.weights = RankWeights(model_path, backend, sharding)
        self._runner: ModelRunner | None = None
        shape = self.weights.shape
        self._info = ModelInfo(
            name=name or self.weights.name,
            vocab_size=shape.vocab_size,
            max_model_len=shape.max_model_len,
            eos_token_ids=shape.eos_token_ids,
            backend=backend.name,
            kv_bytes_per_token=backend.kv_bytes_per_token(shape.kv_spec),
            hidden_size=shape.hidden_size,
        )
        self._grammars = GrammarCompiler(
            load_vocabulary or _no_vocabulary, shape.vocab_size, shape.eos_token_ids, num_kept=num_grammars_kept
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        assert self._runner is None, "allocate is called once"
        self._runner = ModelRunner(
            self.weights.shape,
            self._backend,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            grammars=self._grammars,
        )
        self._runner.use(self.weights.decoder)

    def prepare_grammar(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        return self._grammars.compile(spec)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._require_runner().execute(plan)

    def check(self) -> None:
        """There is no other process."""

    def close(self) -> None:
        """Lets go of the batch and the runner; the memory goes with the object itself."""
        self._grammars.close()
        self._runner = None

    # ------------------------------------------------------------------ weights and memory, between steps

    @property
    def weights_bytes(self) -> int:
        return self.weights.num_bytes

    def open_stage(self, *, is_delta: bool) -> WeightStage:
        return self.weights.open_stage(is_delta=is_delta)

    def finish(self, stage: Stage) -> None:
        assert isinstance(stage, WeightStage), "of open_stage"
        self.weights.finish(stage)

    def swap(self, stage: Stage) -> None:
        assert isinstance(stage, WeightStage), "of open_stage"
        self._require_runner().use(self.weights.swap(stage))

    def close_stage(self, stage: Stage) -> None:
        """It goes with the object."""

    def drop_weights(self) -> None:
        self._require_runner().use(None)
        self.weights.drop()

    def weight_formats(self) -> dict[str, tuple[str, ...]]:
        """How the weights in use are stored, by unit (models/units.py): for tests."""
        return {} if self.weights.set is None else self.weights.set.formats(self._backend)

    def weight_names(self) -> list[str]:
        return self.weights.names()

    def read_weight(self, name: str) -> np.ndarray:
        return self.weights.read(name)

    def differing(self, stage: Stage) -> list[str]:
        assert isinstance(stage, WeightStage), "of open_stage"
        return self.weights.differing(stage)

    def free_kv(self) -> None:
        self._require_runner().free_kv()

    def restore_kv(self) -> None:
        self._require_runner().restore_kv()

    # ------------------------------------------------------------------ experts

    @property
    def expert_map(self) -> ExpertMap | None:
        return self.weights.shard.experts

    @property
    def expert_layers(self) -> list[int]:
        return list(self.weights.shard.moe_index)

    def take_expert_counts(self) -> np.ndarray | None:
        return self.weights.take_counts()

    def _require_runner(self) -> ModelRunner:
        assert self._runner is not None, "allocate comes first"
        return self._runner


def _no_vocabulary() -> Vocabulary:
    raise GrammarError("the engine was started without a tokenizer")
