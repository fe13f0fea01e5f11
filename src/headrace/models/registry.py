"""Which config mapper and which name map a checkpoint needs. A new model is one line here (docs/adding-a-model.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.errors import CheckpointError
from headrace.models import from_gguf, from_hf
from headrace.models.config import DecoderConfig
from headrace.models.names.base import NameMap
from headrace.models.names.gguf import GGUF
from headrace.models.names.hf import GEMMA3, LLAMA
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture of one source is read."""

    make_config: Callable[[Checkpoint], DecoderConfig]
    names: NameMap


FAMILIES: Mapping[str, Mapping[str, Family]] = {
    "safetensors": {
        "llama": Family(from_hf.llama, LLAMA),
        "mistral": Family(from_hf.mistral, LLAMA),
        "qwen2": Family(from_hf.qwen2, LLAMA),
        "qwen3": Family(from_hf.qwen3, LLAMA),
        "gemma3_text": Family(from_hf.gemma3_text, GEMMA3),
        "gemma3": Family(from_hf.gemma3, GEMMA3),
        "ernie4_5": Family(from_hf.ernie4_5, LLAMA),
    },
    "gguf": {
        "llama": Family(from_gguf.llama, GGUF),
        "qwen2": Family(from_gguf.qwen2, GGUF),
        "qwen3": Family(from_gguf.qwen3, GGUF),
        "gemma3": Family(from_gguf.gemma3, GGUF),
        "ernie4_5": Family(from_gguf.ernie4_5, GGUF),
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
