"""Executors: what the engine's core runs its step plans on. `create_executor` picks one; `base.py` is the interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.config.options import ModelConfig
from headrace.executor.base import Executor, ModelInfo
from headrace.grammar import Vocabulary

__all__ = ["Executor", "ModelInfo", "create_executor", "create_mock_executor"]


def create_executor(
    model: ModelConfig,
    model_path: Path,
    load_vocabulary: Callable[[], Vocabulary] | None = None,
    num_grammars_kept: int = 128,
) -> Executor:
    """The executor of one engine, for the model that lies at `model_path`. Blocks while weights load.
    `load_vocabulary` is called in a thread when the first grammar comes."""
    from headrace.executor.uniproc import UniprocExecutor
    from headrace.kernels import create_backend

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
        load_vocabulary=load_vocabulary,
        num_grammars_kept=num_grammars_kept,
    )


def create_mock_executor(model: ModelConfig, step_delay_s: float = 0.0) -> Executor:
    """The mock engine's: it loads neither model nor kernels, and a step takes about as long as it is told."""
    from headrace.testing.echo import EchoExecutor

    return EchoExecutor(name=_name(model) or "echo", step_delay_s=step_delay_s)


def _name(model: ModelConfig) -> str | None:
    return model.served_model_name[0] if model.served_model_name else None
