"""Tensor names of checkpoints that transformers saves (safetensors folders)."""

from __future__ import annotations

from headrace.models.names.base import NameMap

_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_MODULES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_IGNORED = (r".*rotary_emb\.inv_freq", r".*self_attn\.masked_bias", r".*self_attn\.bias")

LLAMA = NameMap(_MODULES, "model.layers.{}.", _LAYER, _IGNORED)

GEMMA3 = NameMap(
    _MODULES,
    "model.layers.{}.",
    _LAYER
    | {
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    # The image part of a multimodal checkpoint is not used for text.
    (*_IGNORED, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.lm_head.", "lm_head.")),
)
