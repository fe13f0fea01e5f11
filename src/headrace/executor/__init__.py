"""Executors: what the engine's core runs its step plans on. `create_executor` picks one; `base.py` is the interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.config.options import ModelConfig, ObservabilityConfig, ParallelConfig
from headrace.errors import ConfigError
from headrace.executor.base import Executor, ModelInfo
from headrace.grammar import Vocabulary

__all__ = ["Executor", "Grammars", "ModelInfo", "create_executor", "create_mock_executor"]


@dataclass(frozen=True, slots=True)
class Grammars:
    """What following grammars takes. `load_vocabulary` is called in a thread when the first grammar comes."""

    load_vocabulary: Callable[[], Vocabulary] | None = None
    num_kept: int = 128


def create_executor(
    model: ModelConfig,
    model_path: Path,
    grammars: Grammars | None = None,
    *,
    parallel: ParallelConfig | None = None,
    observability: ObservabilityConfig | None = None,
    board_path: Path | None = None,
) -> Executor:
    """The executor of one engine, for the model that lies at `model_path`. Blocks while weights load. On the board at
    `board_path` ranks other than 0 write their heartbeats. Raises CheckpointError and ConfigError."""
    from headrace.eplb.files import read_slots
    from headrace.executor.uniproc import UniprocExecutor
    from headrace.kernels import create_backend, has_native
    from headrace.models.shard import Sharding

    parallel, grammars = parallel or ParallelConfig(), grammars or Grammars()
    size = parallel.tensor_parallel_size
    if not parallel.enable_expert_parallel:
        if parallel.redundant_experts:
            raise ConfigError(f"--redundant-experts {parallel.redundant_experts} needs --enable-expert-parallel")
        if parallel.expert_map is not None:
            raise ConfigError(f"--expert-map {parallel.expert_map} needs --enable-expert-parallel")
    sharding = Sharding(
        size=size,
        has_whole_experts=parallel.enable_expert_parallel,
        num_redundant=parallel.redundant_experts,
        slots=None if parallel.expert_map is None else read_slots("--expert-map", parallel.expert_map),
    )
    if size == 1:
        backend = create_backend(
            model.backend,
            num_threads=model.threads,
            kv_cache_dtype=model.kv_cache_dtype,
            quantization=model.quantization,
        )
        return UniprocExecutor(
            model_path,
            backend,
            _name(model),
            load_vocabulary=grammars.load_vocabulary,
            num_grammars_kept=grammars.num_kept,
            sharding=sharding,
        )
    if not has_native() or model.backend not in ("auto", "native"):
        raise ConfigError(f"--tensor-parallel-size {size} needs the native kernels; the backend is {model.backend!r}")
    from headrace.executor.multiproc import MultiprocExecutor, RankOptions

    logs = observability or ObservabilityConfig()
    options = RankOptions.of(model, size, board_path, (logs.log_level, logs.log_format))
    return MultiprocExecutor(model_path, options, sharding, _name(model), grammars)


def create_mock_executor(model: ModelConfig, step_delay_s: float = 0.0) -> Executor:
    """The mock engine's: it loads neither model nor kernels, and a step takes about as long as it is told."""
    from headrace.testing.echo import EchoExecutor

    return EchoExecutor(name=_name(model) or "echo", step_delay_s=step_delay_s)


def _name(model: ModelConfig) -> str | None:
    return model.served_model_name[0] if model.served_model_name else None
