"""Loads a checkpoint into a backend: config, check of every tensor, packing.

Called by the executor through `load_model`. Raises `CheckpointError` alone; reads each tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.kernels.ops import AttentionSpec, Backend, KVSpec, Model, Packed
from headrace.models.config import DecoderConfig
from headrace.models.decoder import Decoder, LayerWeights
from headrace.models.plan import match_tensors
from headrace.models.registry import find_family
from headrace.models.rope import rope_spec
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.tensor import CheckpointTensor, TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that a backend can run, and what the engine must know of it."""

    decoder: Model
    kv_spec: KVSpec
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def load_model(path: Path, backend: Backend) -> LoadedModel:
    """Reads the checkpoint at `path` and packs its weights into `backend`."""
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    config = family.make_config(checkpoint)
    tensors = match_tensors(checkpoint, config, family.names)
    return LoadedModel(
        decoder=_pack(config, tensors, backend),
        kv_spec=KVSpec(config.num_layers, config.num_kv_heads, config.head_dim),
        name=checkpoint.name,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_positions,
        eos_token_ids=config.eos_token_ids,
    )


def _pack(config: DecoderConfig, tensors: Mapping[str, CheckpointTensor], backend: Backend) -> Decoder:
    embed = backend.pack_table(tensors["embed.weight"])
    packer = _Packer(config, tensors, backend)
    return Decoder(
        config=config,
        embed=embed,
        layers=[packer.layer(i) for i in range(config.num_layers)],
        final_norm=packer.norm("final_norm"),
        head=embed if config.has_tied_head else backend.pack_linear([tensors["head.weight"]]),
    )


class _Packer:
    """Packs by our names."""

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, CheckpointTensor], backend: Backend) -> None:
        self.config = config
        self.tensors = tensors
        self.backend = backend
        self.ropes = {rope: rope_spec(rope) for rope in (config.rope, config.local_rope) if rope is not None}

    def linear(self, layer: int, *modules: str) -> Packed:
        names = [f"layers.{layer}.{module}" for module in modules]
        has_bias = f"{names[0]}.bias" in self.tensors
        return self.backend.pack_linear(
            [self.tensors[f"{name}.weight"] for name in names],
            [self.tensors[f"{name}.bias"] for name in names] if has_bias else None,
        )

    def norm(self, module: str) -> Packed:
        tensor = self.tensors[f"{module}.weight"]
        if self.config.norm_offset:
            shifted = tensor.dequantize() + np.float32(self.config.norm_offset)
            tensor = CheckpointTensor(tensor.name, tensor.shape, TensorKind.F32, shifted.view(np.uint8))
        return self.backend.pack_vector(tensor)

    def layer(self, index: int) -> LayerWeights:
        config = self.config

        def optional_norm(module: str, is_there: bool) -> Packed | None:
            return self.norm(f"layers.{index}.{module}") if is_there else None

        return LayerWeights(
            attn_norm=self.norm(f"layers.{index}.attn_norm"),
            qkv=self.linear(index, "q", "k", "v"),
            q_norm=optional_norm("q_norm", config.has_qk_norm),
            k_norm=optional_norm("k_norm", config.has_qk_norm),
            o=self.linear(index, "o"),
            attn_post_norm=optional_norm("attn_post_norm", config.has_post_norms),
            mlp_norm=self.norm(f"layers.{index}.mlp_norm"),
            gate_up=self.linear(index, "gate", "up"),
            down=self.linear(index, "down"),
            mlp_post_norm=optional_norm("mlp_post_norm", config.has_post_norms),
            rope=self.ropes[config.layer_rope(index)],
            attention=AttentionSpec(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale or config.head_dim**-0.5,
                sliding_window=config.sliding_window if config.is_sliding(index) else None,
                soft_cap=config.attention_soft_cap,
            ),
        )
