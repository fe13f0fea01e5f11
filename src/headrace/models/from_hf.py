"""Maps a transformers config.json to `DecoderConfig`, one function per model type.

Registered in `registry.py`. Defaults are those of the transformers configuration classes, because a saved config
leaves out what equals them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.errors import CheckpointError
from headrace.models.config import DecoderConfig, RopeConfig, check_config
from headrace.models.fields import Fields
from headrace.models.rope import SCALINGS, yarn_attention_factor
from headrace.weights.checkpoint import Checkpoint

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


def fields_of(checkpoint: Checkpoint) -> Fields:
    """Of config.json."""
    return Fields(checkpoint.metadata, str(checkpoint.path / "config.json"))


def llama(checkpoint: Checkpoint) -> DecoderConfig:
    """Llama 1 to 3, SmolLM2."""
    fields = fields_of(checkpoint)
    has_bias = fields.boolean("attention_bias", False)
    return build(
        checkpoint,
        fields,
        {"num_key_value_heads": None, "max_position_embeddings": 2048, "tie_word_embeddings": False, "eos_token_id": 2},
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=fields.boolean("mlp_bias", False),
    )


def mistral(checkpoint: Checkpoint) -> DecoderConfig:
    fields = fields_of(checkpoint)
    window = window_of(fields, 4096)
    num_layers = fields.integer("num_hidden_layers", high=1000)
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return build(checkpoint, fields, defaults, sliding_window=window, sliding_layers=(window is not None,) * num_layers)


def qwen2(checkpoint: Checkpoint) -> DecoderConfig:
    fields = fields_of(checkpoint)
    return build(checkpoint, fields, _QWEN, has_qkv_bias=True, **_qwen_sliding(fields))


def qwen3(checkpoint: Checkpoint) -> DecoderConfig:
    fields = fields_of(checkpoint)
    has_bias = fields.boolean("attention_bias", False)
    return build(
        checkpoint,
        fields,
        _QWEN | {"head_dim": 128},
        qk_norm="head",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        **_qwen_sliding(fields),
    )


def ernie4_5(checkpoint: Checkpoint) -> DecoderConfig:
    """ERNIE 4.5, dense. Its rotary pairs are neighbours."""
    fields = fields_of(checkpoint)
    has_bias = fields.boolean("use_bias", False)
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "is_interleaved": True,
        "eos_token_id": 2,
    }
    return build(checkpoint, fields, defaults, has_qkv_bias=has_bias, has_output_bias=has_bias, has_mlp_bias=has_bias)


def gemma3_text(checkpoint: Checkpoint) -> DecoderConfig:
    return _gemma3(checkpoint, fields_of(checkpoint))


def gemma3(checkpoint: Checkpoint) -> DecoderConfig:
    """The text part of a multimodal Gemma 3."""
    return _gemma3(checkpoint, fields_of(checkpoint).section("text_config"))


_QWEN: dict[str, Any] = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "tie_word_embeddings": False}
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 1,
}


def _gemma3(checkpoint: Checkpoint, fields: Fields) -> DecoderConfig:
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.refuse("use_bidirectional_attention", True, "false")
    num_layers = fields.integer("num_hidden_layers", _GEMMA3["num_hidden_layers"], high=1000)
    pattern = fields.integer("sliding_window_pattern", 6)
    default_types = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    has_bias = fields.boolean("attention_bias", False)
    hidden_size = fields.integer("hidden_size", _GEMMA3["hidden_size"])
    return build(
        checkpoint,
        fields,
        _GEMMA3,
        activation_key="hidden_activation",
        activation_default="gelu_pytorch_tanh",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="head",
        has_post_norms=True,
        norm_offset=1.0,
        embedding_scale=float(np.sqrt(np.float32(hidden_size))),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_optional_number(fields, "attn_logit_softcapping"),
        logit_soft_cap=_optional_number(fields, "final_logit_softcapping"),
        sliding_window=window_of(fields, 4096),
        sliding_layers=layer_types(fields, default_types),
        local_theta=fields.number("rope_local_base_freq", 10000.0),
    )


def build(
    checkpoint: Checkpoint,
    fields: Fields,
    defaults: dict[str, Any],
    *,
    activation_key: str = "hidden_act",
    activation_default: str = "silu",
    local_theta: float | None = None,
    **variant: Any,
) -> DecoderConfig:
    """The fields that every family has, plus those of the variant."""

    def size(key: str, high: int = 1 << 24) -> int:
        return fields.integer(key, defaults[key], high=high) if key in defaults else fields.integer(key, high=high)

    num_heads = size("num_attention_heads")
    hidden_size = size("hidden_size")
    head_dim = fields.integer("head_dim", defaults.get("head_dim") or max(1, hidden_size // num_heads), high=4096)
    activation = fields.string(activation_key, activation_default)
    config = DecoderConfig(
        architecture=checkpoint.architecture,
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers", 1000),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", defaults["num_key_value_heads"] or num_heads),
        head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings", defaults["max_position_embeddings"]),
        rms_norm_eps=fields.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields, defaults, head_dim, FULL),
        local_rope=None if local_theta is None else _rope(fields, {"rope_theta": local_theta}, head_dim, SLIDING),
        eos_token_ids=_eos(checkpoint, fields, defaults.get("eos_token_id")),
        activation=ACTIVATIONS.get(activation, activation),
        has_tied_head=fields.boolean("tie_word_embeddings", defaults["tie_word_embeddings"]),
        **variant,
    )
    return check_config(config, fields.where)


def _rope(fields: Fields, defaults: dict[str, Any], head_dim: int, layer_type: str) -> RopeConfig:
    """From `rope_parameters` (flat or per layer type) or the older `rope_theta` with `rope_scaling`."""
    parameters = fields.section("rope_parameters")
    if layer_type in parameters.values:
        parameters = parameters.section(layer_type)
    elif not parameters.values and layer_type == FULL:
        parameters = fields.section("rope_scaling")
    default_theta = defaults.get("rope_theta", 10000.0)
    # Sliding layers have a theta key of their own, which the caller has read.
    theta = default_theta if layer_type == SLIDING else fields.number("rope_theta", default_theta)
    scaling = parameters.string("rope_type", parameters.string("type", "default"))
    if scaling not in SCALINGS:
        raise parameters.refuse("rope_type", scaling, ", ".join(SCALINGS))
    partial = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    max_positions = fields.integer("max_position_embeddings", defaults.get("max_position_embeddings", 131072))
    original = parameters.integer("original_max_position_embeddings", max_positions)
    can_omit_factor = scaling in ("default", "yarn")
    factor = parameters.number("factor", max_positions / original) if can_omit_factor else parameters.number("factor")
    attention_factor = yarn_attention_factor(factor)
    mscale, mscale_all = parameters.raw("mscale"), parameters.raw("mscale_all_dim")
    if scaling == "yarn" and mscale and mscale_all:
        raise parameters.refuse("mscale", mscale, "absent, or without mscale_all_dim")
    rope = RopeConfig(
        theta=parameters.number("rope_theta", theta),
        rotary_dim=int(head_dim * min(partial, 1.0)),
        is_interleaved=defaults.get("is_interleaved", False),
        scaling=scaling,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=parameters.number("low_freq_factor", 1.0),
        high_freq_factor=parameters.number("high_freq_factor", 4.0),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        attention_factor=parameters.number("attention_factor", attention_factor),
        is_truncated=parameters.boolean("truncate", True),
    )
    if scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise parameters.refuse("high_freq_factor", rope.high_freq_factor, f"above {rope.low_freq_factor:g}")
    return rope


def window_of(fields: Fields, default: int | None) -> int | None:
    """An absent window is the class's default, a null one means none."""
    if "sliding_window" not in fields.values:
        return default
    return None if fields.raw("sliding_window") is None else fields.integer("sliding_window")


def _optional_number(fields: Fields, key: str) -> float | None:
    return None if fields.raw(key) is None else fields.number(key)


def layer_types(fields: Fields, default: list[str]) -> tuple[bool, ...]:
    """Which layers slide."""
    types = default if fields.raw("layer_types") is None else fields.raw("layer_types")
    if not isinstance(types, list) or any(kind not in (FULL, SLIDING) for kind in types):
        raise fields.refuse("layer_types", types, f"a list of {FULL} and {SLIDING}")
    return tuple(kind == SLIDING for kind in types)


def _qwen_sliding(fields: Fields) -> dict[str, Any]:
    """Qwen's upper layers slide, when that is on at all."""
    if not fields.boolean("use_sliding_window", False):
        return {}
    window = window_of(fields, 4096)
    if window is None:
        return {}
    first = fields.integer("max_window_layers", 28, low=0)
    num_layers = fields.integer("num_hidden_layers", high=1000)
    types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    return {"sliding_window": window, "sliding_layers": layer_types(fields, types)}


def _eos(checkpoint: Checkpoint, fields: Fields, default: int | None) -> tuple[int, ...]:
    """Of config.json and generation_config.json together."""
    places = [
        Fields(checkpoint.generation, str(checkpoint.path / "generation_config.json")),
        fields_of(checkpoint),
        fields,
    ]
    token_ids: list[int] = []
    for place in places:
        value = place.raw("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise CheckpointError(
                    f"{place.where}: eos_token_id {str(value)[:80]} is not a token id or a list of them"
                )
            token_ids.append(token_id)
    if not token_ids and default is not None:
        token_ids.append(default)
    return tuple(dict.fromkeys(token_ids))
