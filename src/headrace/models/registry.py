"""Which config mapper and which name map a checkpoint needs. A new model is one line here (docs/adding-a-model.md).

A family of GGUF files also says how transformers lays the same model out: trainers send tensors in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.errors import CheckpointError
from headrace.models import from_gguf, from_hf, from_hf_moe
from headrace.models.config import DecoderConfig
from headrace.models.names.base import NameMap
from headrace.models.names.gguf import GGUF
from headrace.models.names.hf import ERNIE_MOE, GEMMA3, LLAMA, MIXTRAL, QWEN_MOE
from headrace.models.units import Layout
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture of one source is read."""

    make_config: Callable[[Checkpoint], DecoderConfig]
    names: NameMap
    as_transformers: Callable[[DecoderConfig], Layout] | None = None


def _llama(config: DecoderConfig) -> Layout:
    """llama.cpp reorders the rows of Q and K so that the two numbers of a rotated pair are neighbours. With experts it
    is a Mixtral."""
    names = LLAMA if config.moe is None else MIXTRAL
    return Layout(replace(config, rope=replace(config.rope, is_interleaved=False)), names)


def _gemma3(config: DecoderConfig) -> Layout:
    """llama.cpp stores norm weights with the 1 added that transformers adds while it computes."""
    return Layout(replace(config, norm_offset=1.0), GEMMA3)


def _same(config: DecoderConfig) -> Layout:
    return Layout(config, LLAMA)


def _qwen_moe(config: DecoderConfig) -> Layout:
    return Layout(config, QWEN_MOE)


def _ernie_moe(config: DecoderConfig) -> Layout:
    return Layout(config, ERNIE_MOE)


FAMILIES: Mapping[str, Mapping[str, Family]] = {
    "safetensors": {
        "llama": Family(from_hf.llama, LLAMA),
        "mistral": Family(from_hf.mistral, LLAMA),
        "qwen2": Family(from_hf.qwen2, LLAMA),
        "qwen3": Family(from_hf.qwen3, LLAMA),
        "gemma3_text": Family(from_hf.gemma3_text, GEMMA3),
        "gemma3": Family(from_hf.gemma3, GEMMA3),
        "ernie4_5": Family(from_hf.ernie4_5, LLAMA),
        "qwen3_moe": Family(from_hf_moe.qwen3_moe, QWEN_MOE),
        "qwen2_moe": Family(from_hf_moe.qwen2_moe, QWEN_MOE),
        "mixtral": Family(from_hf_moe.mixtral, MIXTRAL),
        "olmoe": Family(from_hf_moe.olmoe, QWEN_MOE),
        "ernie4_5_moe": Family(from_hf_moe.ernie4_5_moe, ERNIE_MOE),
    },
    "gguf": {
        "llama": Family(from_gguf.llama, GGUF, _llama),
        "qwen2": Family(from_gguf.qwen2, GGUF, _same),
        "qwen3": Family(from_gguf.qwen3, GGUF, _same),
        "gemma3": Family(from_gguf.gemma3, GGUF, _gemma3),
        "ernie4_5": Family(from_gguf.ernie4_5, GGUF, _same),
        "qwen3moe": Family(from_gguf.qwen3moe, GGUF, _qwen_moe),
        "qwen2moe": Family(from_gguf.qwen2moe, GGUF, _qwen_moe),
        "olmoe": Family(from_gguf.olmoe, GGUF, _qwen_moe),
        "ernie4_5-moe": Family(from_gguf.ernie4_5_moe, GGUF, _ernie_moe),
    },
}


def find_family(checkpoint: Checkpoint) -> Family:
    families = FAMILIES[checkpoint.source]
    family = families.get(checkpoint.architecture)
    if family is None:
        raise CheckpointError(
            f"{checkpoint.path}: architecture {checkpoint.architecture[:60]!r} is not supported"
            f" from {checkpoint.source}; supported: {', '.join(families)}"
        )
    return family
