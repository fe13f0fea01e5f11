"""The executor with one rank: the worker is an object in the engine's own process.

`create_executor` makes it. It loads the model at once, and the batch and KV memory when the engine has decided
their sizes. It holds no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from headrace.errors import NotFound
from headrace.executor.base import ModelInfo, Stage
from headrace.grammar import CompiledGrammar, GrammarCompiler, GrammarError, Vocabulary
from headrace.kernels import Backend
from headrace.models import load_model
from headrace.models.stage import WeightStage
from headrace.models.units import WeightSet
from headrace.runner import ModelRunner, ModelShape
from headrace.transport.plan import StepPlan, StepResult
from headrace.types import GrammarSpec


class UniprocExecutor:
    """Implements `Executor` in the calling thread."""

    def __init__(
        self,
        model_path: Path,
        backend: Backend,
        name: str | None = None,
        *,
        load_vocabulary: Callable[[], Vocabulary] | None = None,
        num_grammars_kept: int = 128,
    ) -> None:
        """Loads the weights; raises `CheckpointError`. `name` replaces the model's own. Without a vocabulary no
        grammar can be followed."""
        self._backend = backend
        model = load_model(model_path, self._backend)
        # Nothing else of the loaded model is kept: it would keep the first weights alive.
        self._layouts = model.layouts
        self._shape = ModelShape(
            kv_spec=model.kv_spec,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
        )
        self._weights: WeightSet | None = model.weights
        self._formats = model.weights.formats(backend)
        self._weights_bytes = model.weights.num_bytes(backend)
        self._runner: ModelRunner | None = None
        self._info = ModelInfo(
            name=name or model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            backend=backend.name,
            kv_bytes_per_token=backend.kv_bytes_per_token(model.kv_spec),
        )
        self._grammars = GrammarCompiler(
            load_vocabulary or _no_vocabulary, model.vocab_size, model.eos_token_ids, num_kept=num_grammars_kept
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        assert self._runner is None, "allocate is called once"
        self._runner = ModelRunner(
            self._shape,
            self._backend,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            grammars=self._grammars,
        )
        if self._weights is not None:
            self._runner.use(self._weights.decoder())

    def prepare_grammar(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        return self._grammars.compile(spec)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._require_runner().execute(plan)

    def close(self) -> None:
        """Lets go of the batch and the runner; the memory goes with the object itself."""
        self._grammars.close()
        self._runner = None

    # ------------------------------------------------------------------ weights and memory, between steps

    @property
    def weights_bytes(self) -> int:
        return self._weights_bytes

    def open_stage(self, *, is_delta: bool) -> WeightStage:
        assert self._weights is not None or not is_delta, "a delta changes weights that are there"
        base = self._weights if is_delta else None
        return WeightStage(self._backend, self._layouts, self._formats, base)

    def finish(self, stage: Stage) -> None:
        assert isinstance(stage, WeightStage), "of open_stage"
        weights = stage.finish()
        decoder = weights.decoder()
        self._backend.prepare(decoder)
        stage.result = weights, decoder

    def swap(self, stage: Stage) -> None:
        assert isinstance(stage, WeightStage), "of open_stage"
        assert stage.result is not None, "finish comes first"
        self._weights, decoder = stage.result
        self._require_runner().use(decoder)

    def drop_weights(self) -> None:
        self._weights = None
        self._require_runner().use(None)
        self._backend.forget()

    def weight_formats(self) -> dict[str, tuple[str, ...]]:
        """How the weights in use are stored, by unit (models/units.py): for tests."""
        return {} if self._weights is None else self._weights.formats(self._backend)

    def weight_names(self) -> list[str]:
        weights = self._weights
        return [] if weights is None else weights.source_names()

    def read_weight(self, name: str) -> np.ndarray:
        weights = self._weights
        ours = None if weights is None else weights.layout.our_names.get(weights.layout.names.normalise(name))
        if weights is None or ours is None:
            raise NotFound(f"There is no tensor {name[:80]!r}.", param="name")
        return weights.values(self._backend, ours)

    def differing(self, stage: Stage) -> list[str]:
        assert isinstance(stage, WeightStage), "of open_stage"
        ours, theirs = self._weights, stage.finish()
        if ours is None:
            raise NotFound("There are no weights in use.")
        return ours.differing(theirs, self._backend)

    def free_kv(self) -> None:
        self._require_runner().free_kv()

    def restore_kv(self) -> None:
        self._require_runner().restore_kv()

    def _require_runner(self) -> ModelRunner:
        assert self._runner is not None, "allocate comes first"
        return self._runner


def _no_vocabulary() -> Vocabulary:
    raise GrammarError("the engine was started without a tokenizer")
