"""Headrace: an inference server for language models. `from headrace import LLM, SamplingParams` for offline use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.types import SamplingParams


def __getattr__(name: str) -> Any:
    """Imports on first use, so that each process pays only for what it needs."""
    if name == "LLM":
        from headrace.llm import LLM

        return LLM
    if name == "SamplingParams":
        from headrace.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
