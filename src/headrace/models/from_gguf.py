"""Maps GGUF metadata to `DecoderConfig`, one function per architecture.

Registered in `registry.py`. What metadata does not say follows llama.cpp (github.com/ggml-org/llama.cpp, MIT): the
rotary pairing of each architecture, Gemma's pattern of sliding layers, its local theta and its 27B attention scale,
and which families divide the weights of the chosen experts by their sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from headrace.models.config import MAX_EXPERTS, DecoderConfig, MoeConfig, RopeConfig, check_config
from headrace.models.fields import Fields
from headrace.models.rope import yarn_attention_factor
from headrace.weights.checkpoint import Checkpoint

SCALINGS = ("none", "linear", "yarn")
ROPE_FREQS = "rope_freqs.weight"
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
GEMMA3_27B_LAYERS = 62


def llama(checkpoint: Checkpoint) -> DecoderConfig:
    """Llama, SmolLM2, Mistral, Mixtral. llama.cpp permutes q and k so that rotary pairs are neighbours."""
    fields = _fields(checkpoint)
    variant: dict[str, Any] = {"moe": _moe(checkpoint, fields)} if fields.raw("expert_count") else {}
    if fields.raw("attention.sliding_window"):
        num_layers = fields.integer("block_count", high=1000)
        window = fields.integer("attention.sliding_window")
        variant |= {"sliding_window": window, "sliding_layers": (True,) * num_layers}
    return _build(checkpoint, fields, is_interleaved=True, **variant)


def qwen2(checkpoint: Checkpoint) -> DecoderConfig:
    return _build(checkpoint, _fields(checkpoint))


def qwen3(checkpoint: Checkpoint) -> DecoderConfig:
    return _build(checkpoint, _fields(checkpoint), qk_norm="head")


def ernie4_5(checkpoint: Checkpoint) -> DecoderConfig:
    return _build(checkpoint, _fields(checkpoint), is_interleaved=True, default_theta=500000.0)


def qwen3moe(checkpoint: Checkpoint) -> DecoderConfig:
    fields = _fields(checkpoint)
    return _build(checkpoint, fields, qk_norm="head", moe=_moe(checkpoint, fields))


def qwen2moe(checkpoint: Checkpoint) -> DecoderConfig:
    fields = _fields(checkpoint)
    default_size = fields.integer("feed_forward_length") // fields.integer("expert_used_count")
    moe = _moe(checkpoint, fields, is_normalised=False, default_size=default_size)
    return _build(checkpoint, fields, moe=replace(moe, has_shared_gate=True))


def olmoe(checkpoint: Checkpoint) -> DecoderConfig:
    fields = _fields(checkpoint)
    if fields.raw("attention.clamp_kqv"):
        raise fields.refuse("attention.clamp_kqv", fields.raw("attention.clamp_kqv"), "0, or none at all")
    return _build(checkpoint, fields, qk_norm="whole", moe=_moe(checkpoint, fields, is_normalised=False))


def ernie4_5_moe(checkpoint: Checkpoint) -> DecoderConfig:
    fields = _fields(checkpoint)
    moe = replace(_moe(checkpoint, fields), norm_floor=1e-12, has_routing_bias=True)
    return _build(checkpoint, fields, is_interleaved=True, default_theta=500000.0, moe=moe)


def gemma3(checkpoint: Checkpoint) -> DecoderConfig:
    """The + 1 of Gemma's norms is in the file's weights already."""
    fields = _fields(checkpoint)
    num_layers = fields.integer("block_count", high=1000)
    pattern = fields.integer("attention.sliding_window_pattern", 6)
    hidden_size = fields.integer("embedding_length")
    head_dim = _head_dim(fields)
    is_27b = num_layers == GEMMA3_27B_LAYERS
    scale_base = hidden_size // fields.integer("attention.head_count") if is_27b else head_dim
    local_theta = fields.number("rope.freq_base_swa", 10000.0)
    return _build(
        checkpoint,
        fields,
        default_theta=1_000_000.0,
        local_rope=RopeConfig(theta=local_theta, rotary_dim=head_dim),
        activation="gelu_tanh",
        qk_norm="head",
        has_post_norms=True,
        embedding_scale=float(np.sqrt(np.float32(hidden_size))),
        attention_scale=scale_base**-0.5,
        logit_soft_cap=_optional_number(fields, "final_logit_softcapping"),
        attention_soft_cap=_optional_number(fields, "attn_logit_softcapping"),
        sliding_window=fields.integer("attention.sliding_window"),
        sliding_layers=tuple(bool((i + 1) % pattern) for i in range(num_layers)),
    )


def _moe(
    checkpoint: Checkpoint, fields: Fields, *, is_normalised: bool = True, default_size: int | None = None
) -> MoeConfig:
    """Layers with a router have experts. The size of a shared one is that of its tensor: metadata has been wrong."""
    num_layers = fields.integer("block_count", high=1000)
    shared = [t for name, t in checkpoint.tensors.items() if name.endswith(".ffn_gate_shexp.weight")]
    expert_size = fields.integer("expert_feed_forward_length", default_size or fields.integer("feed_forward_length"))
    return MoeConfig(
        moe_layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in checkpoint.tensors for i in range(num_layers)),
        num_experts=fields.integer("expert_count", high=MAX_EXPERTS),
        num_experts_per_token=fields.integer("expert_used_count", high=MAX_EXPERTS),
        expert_size=expert_size,
        is_normalised=fields.boolean("expert_weights_norm", is_normalised),
        scale=fields.number("expert_weights_scale", 1.0),
        shared_size=shared[0].shape[0] if shared else 0,
    )


def _fields(checkpoint: Checkpoint) -> Fields:
    return Fields(checkpoint.metadata, str(checkpoint.path), f"{checkpoint.architecture}.")


def _optional_number(fields: Fields, key: str) -> float | None:
    return None if fields.raw(key) is None else fields.number(key)


def _head_dim(fields: Fields) -> int:
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads), high=4096)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise fields.refuse("attention.value_length", value_dim, f"{head_dim}, like the key's")
    return head_dim


def _vocab_size(checkpoint: Checkpoint, fields: Fields) -> int:
    """The table's own row count; the metadata may leave it out."""
    table = checkpoint.tensors.get("token_embd.weight")
    return table.shape[0] if table is not None else fields.integer("vocab_size")


def _build(
    checkpoint: Checkpoint,
    fields: Fields,
    *,
    is_interleaved: bool = False,
    default_theta: float = 10000.0,
    **variant: Any,
) -> DecoderConfig:
    """The fields that every architecture has, plus those of the variant."""
    num_heads = fields.integer("attention.head_count")
    config = DecoderConfig(
        architecture=checkpoint.architecture,
        vocab_size=_vocab_size(checkpoint, fields),
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", high=1000),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=_head_dim(fields),
        max_positions=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(checkpoint, fields, is_interleaved, default_theta),
        eos_token_ids=_eos(checkpoint),
        has_tied_head="output.weight" not in checkpoint.tensors,
        has_qkv_bias="blk.0.attn_q.bias" in checkpoint.tensors,
        has_output_bias="blk.0.attn_output.bias" in checkpoint.tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in checkpoint.tensors,
        **variant,
    )
    return check_config(config, fields.where)


def _rope(checkpoint: Checkpoint, fields: Fields, is_interleaved: bool, default_theta: float) -> RopeConfig:
    scaling = fields.string("rope.scaling.type", "none")
    if scaling not in SCALINGS:
        raise fields.refuse("rope.scaling.type", scaling, ", ".join(SCALINGS))
    factor = fields.number("rope.scaling.factor", 1.0)
    freqs = checkpoint.tensors.get(ROPE_FREQS)
    attention_factor = yarn_attention_factor(factor) * fields.number("rope.scaling.attn_factor", 1.0)
    return RopeConfig(
        theta=fields.number("rope.freq_base", default_theta),
        rotary_dim=fields.integer("rope.dimension_count", _head_dim(fields)),
        is_interleaved=is_interleaved,
        scaling="default" if scaling == "none" else scaling,
        factor=factor,
        original_max_positions=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor,
        divisors=None if freqs is None or len(freqs.shape) != 1 else tuple(freqs.dequantize().tolist()),
    )


def _eos(checkpoint: Checkpoint) -> tuple[int, ...]:
    fields = Fields(checkpoint.metadata, str(checkpoint.path), "tokenizer.ggml.")
    return tuple(dict.fromkeys(fields.integer(key, low=0) for key in EOS_KEYS if fields.raw(key) is not None))
