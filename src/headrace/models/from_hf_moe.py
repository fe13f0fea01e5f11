"""Maps config.json of mixture-of-experts families to `DecoderConfig`, as `from_hf.py` does for dense ones.

Registered in `registry.py`. A size that transformers knows under two names may be saved under either.
"""

from __future__ import annotations

from typing import Any

from headrace.models.config import MAX_EXPERTS, DecoderConfig, MoeConfig
from headrace.models.fields import Fields
from headrace.models.from_hf import build, fields_of, layer_types, window_of
from headrace.weights.checkpoint import Checkpoint


def qwen3_moe(checkpoint: Checkpoint) -> DecoderConfig:
    fields = fields_of(checkpoint)
    has_bias = fields.boolean("attention_bias", False)
    moe = MoeConfig(
        moe_layers=_qwen_layers(fields),
        num_experts=_size(fields, ("num_experts", "num_local_experts"), 128, MAX_EXPERTS),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_size=fields.integer("moe_intermediate_size", 768),
        is_normalised=fields.boolean("norm_topk_prob", False),
    )
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": False}
    window = window_of(fields, 4096) if fields.boolean("use_sliding_window", False) else None
    return build(
        checkpoint,
        fields,
        defaults,
        qk_norm="head",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        moe=moe,
        **_sliding(fields, window),
    )


def qwen2_moe(checkpoint: Checkpoint) -> DecoderConfig:
    """Qwen1.5-MoE and Qwen2-MoE: beside the experts one for all tokens, with a gate."""
    fields = fields_of(checkpoint)
    moe = MoeConfig(
        moe_layers=_qwen_layers(fields),
        num_experts=_size(fields, ("num_experts", "num_local_experts"), 60, MAX_EXPERTS),
        num_experts_per_token=fields.integer("num_experts_per_tok", 4),
        expert_size=fields.integer("moe_intermediate_size", 1408),
        is_normalised=fields.boolean("norm_topk_prob", False),
        shared_size=fields.integer("shared_expert_intermediate_size", 5632),
        has_shared_gate=True,
    )
    sliding: dict[str, Any] = {}
    if fields.boolean("use_sliding_window", False):
        # Every second of the lower layers slides, where the file does not say which.
        last = fields.integer("max_window_layers", 28, low=0)
        num_layers = fields.integer("num_hidden_layers", 24, high=1000)
        kinds = ["sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(num_layers)]
        sliding = {"sliding_window": window_of(fields, 4096), "sliding_layers": layer_types(fields, kinds)}
    defaults = {"num_key_value_heads": 16, "max_position_embeddings": 32768, "tie_word_embeddings": False}
    return build(checkpoint, fields, defaults, has_qkv_bias=fields.boolean("qkv_bias", True), moe=moe, **sliding)


def mixtral(checkpoint: Checkpoint) -> DecoderConfig:
    fields = fields_of(checkpoint)
    moe = MoeConfig(
        moe_layers=_all_layers(fields),
        num_experts=_size(fields, ("num_local_experts", "num_experts"), 8, MAX_EXPERTS),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        expert_size=fields.integer("intermediate_size"),
    )
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "eos_token_id": 2,
    }
    return build(checkpoint, fields, defaults, moe=moe, **_sliding(fields, window_of(fields, None)))


def olmoe(checkpoint: Checkpoint) -> DecoderConfig:
    """OLMoE norms queries and keys of all heads together."""
    fields = fields_of(checkpoint)
    if fields.raw("clip_qkv") is not None:
        raise fields.refuse("clip_qkv", fields.raw("clip_qkv"), "null")
    has_bias = fields.boolean("attention_bias", False)
    moe = MoeConfig(
        moe_layers=_all_layers(fields),
        num_experts=_size(fields, ("num_experts", "num_local_experts"), 64, MAX_EXPERTS),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        expert_size=fields.integer("intermediate_size"),
        is_normalised=fields.boolean("norm_topk_prob", False),
    )
    defaults = {
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    }
    return build(
        checkpoint, fields, defaults, qk_norm="whole", has_qkv_bias=has_bias, has_output_bias=has_bias, moe=moe
    )


def ernie4_5_moe(checkpoint: Checkpoint) -> DecoderConfig:
    """ERNIE 4.5 with experts. A correction bias takes part in the choice; rotary pairs are neighbours."""
    fields = fields_of(checkpoint)
    num_layers = fields.integer("num_hidden_layers", high=1000)
    first = fields.integer("moe_layer_start_index", 1, low=0)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    last = num_layers - 1 if last == -1 else last
    interval = fields.integer("moe_layer_interval", 1)
    expert_size = fields.integer("moe_intermediate_size", 1536)
    moe = MoeConfig(
        moe_layers=tuple(first <= i <= last and (i + 1) % interval == 0 for i in range(num_layers)),
        num_experts=_size(fields, ("moe_num_experts", "num_experts"), 64, MAX_EXPERTS),
        num_experts_per_token=_size(fields, ("moe_k", "num_experts_per_tok"), 6, MAX_EXPERTS),
        expert_size=expert_size,
        norm_floor=fields.number("moe_norm_min", 1e-12),
        has_routing_bias=True,
        shared_size=expert_size * fields.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS),
    )
    has_bias = fields.boolean("use_bias", False)
    defaults = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "is_interleaved": True,
        "eos_token_id": 2,
    }
    return build(
        checkpoint,
        fields,
        defaults,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        has_head_bias=has_bias,
        moe=moe,
    )


def _size(fields: Fields, keys: tuple[str, ...], default: int, high: int) -> int:
    """Of the first key that is there."""
    return fields.integer(next((key for key in keys if fields.raw(key) is not None), keys[0]), default, high=high)


def _all_layers(fields: Fields) -> tuple[bool, ...]:
    return (True,) * fields.integer("num_hidden_layers", high=1000)


def _qwen_layers(fields: Fields) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`th layer has experts, but for those of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise fields.refuse("mlp_only_layers", dense, "a list of layer numbers")
    num_layers = fields.integer("num_hidden_layers", high=1000)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _sliding(fields: Fields, window: int | None) -> dict[str, Any]:
    """Of all layers, if there is a window."""
    num_layers = fields.integer("num_hidden_layers", high=1000)
    return {} if window is None else {"sliding_window": window, "sliding_layers": (True,) * num_layers}
