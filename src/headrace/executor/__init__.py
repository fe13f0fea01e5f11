"""Executors: what the engine's core runs its step plans on. `create_executor` picks one; `base.py` is the interface."""

from __future__ import annotations

from pathlib import Path

from headrace.config.options import ModelConfig
from headrace.errors import ConfigError
from headrace.executor.base import Executor, ModelInfo

__all__ = ["Executor", "ModelInfo", "create_executor"]


def create_executor(model: ModelConfig, model_path: Path | None, mock: bool) -> Executor:
    """The executor of one engine. Blocks while weights load; the mock loads neither model nor kernels.

    `model_path` is where the model named in `model` lies; the mock does without.
    """
    name = model.served_model_name[0] if model.served_model_name else None
    if mock:
        from headrace.testing.echo import EchoExecutor

        return EchoExecutor(name=name or "echo")
    if model_path is None:
        raise ConfigError(f"no model file for {model.model!r}; only --mock-engine runs without one")
    from headrace.executor.uniproc import UniprocExecutor
    from headrace.kernels import create_backend

    backend = create_backend(
        model.backend,
        num_threads=model.threads,
        kv_cache_dtype=model.kv_cache_dtype,
        quantization=model.quantization,
    )
    return UniprocExecutor(model_path, backend, name)
