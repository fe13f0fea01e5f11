"""Turns a tiny safetensors model (`tiny.py`) into a GGUF file, as llama.cpp's converter would.

For tests of GGUF loading. Without a vocabulary: the tokenizer stays the folder's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from headrace.models.config import DecoderConfig
from headrace.models.from_gguf import ROPE_FREQS
from headrace.models.names.gguf import GGUF
from headrace.models.plan import match_tensors
from headrace.models.registry import find_family
from headrace.models.rope import rope_spec
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.tensor import CheckpointTensor

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "ernie4_5": "ernie4_5",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "ernie4_5_moe": "ernie4_5-moe",
}


def write_tiny_gguf(folder: Path, path: Path, *, kinds: Mapping[str, str] | None = None) -> Path:
    """The model of `folder` as a GGUF file at `path`, which is returned.

    `kinds` gives the stored kind of matrices by module (q, k, v, o, gate, up, down, embed, head); F32 is the default.
    """
    checkpoint = open_checkpoint(folder)
    family = find_family(checkpoint)
    config = family.make_config(checkpoint)
    architecture = ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config, architecture)
    experts: dict[str, list[np.ndarray]] = {}  # of each fused tensor, in their order
    for name, tensor in match_tensors(checkpoint, config, family.names).items():
        kind = (kinds or {}).get(name.split(".")[-2], "F32")
        if ".experts." not in name:
            _add_tensor(writer, name, tensor, config, architecture, kind)
            continue
        _, layer, _, _, module, _ = name.split(".")
        fused = f"blk.{layer}.ffn_{module}_exps.weight"
        experts.setdefault(fused, []).append(tensor.dequantize())
        if config.moe is not None and len(experts[fused]) == config.moe.num_experts:
            _write(writer, fused, np.stack(experts.pop(fused)), kind)
    if config.rope.scaling == "llama3":
        plain = 1.0 / config.rope.theta ** (np.arange(0, config.rope.rotary_dim, 2) / config.rope.rotary_dim)
        writer.add_tensor(ROPE_FREQS, (plain / rope_spec(config.rope).inv_freq).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: DecoderConfig, architecture: str) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.rotary_dim)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.rope.scaling in ("linear", "yarn"):
        writer.add_string(f"{architecture}.rope.scaling.type", config.rope.scaling)
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_positions)
    if config.moe is not None:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.num_experts_per_token)
        writer.add_expert_feed_forward_length(config.moe.expert_size)
    for key, token_id in zip(("eos", "eot"), config.eos_token_ids, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: CheckpointTensor, config: DecoderConfig, architecture: str, kind: str
) -> None:
    numbers = tensor.dequantize()
    if name.endswith("norm.weight"):
        numbers += np.float32(config.norm_offset)
    module = name.split(".")[-2]
    if architecture == "llama" and module in ("q", "k"):
        # Halves become neighbours: the converter's permutation for interleaved rotary pairs.
        rows = numbers.reshape(-1, 2, config.head_dim // 2, *numbers.shape[1:])
        numbers = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(numbers.shape)
    if module == "shared_expert_gate":
        numbers = numbers[0]
    _write(writer, GGUF.source_name(name), numbers, "F32" if numbers.ndim == 1 else kind)


def _write(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, numbers)
    else:
        ggml_kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(numbers, ggml_kind), raw_dtype=ggml_kind)
