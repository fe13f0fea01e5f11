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

# Files have one tensor per expert; models in memory, from transformers 5 on, have all experts of a layer in one.
_FUSED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def _moe_names(
    block: str,
    experts: tuple[str, str, str],
    shared: str = "",
    ignored: tuple[str, ...] = (),
    infixes: tuple[tuple[str, str], ...] = (),
) -> NameMap:
    """`experts` are the names of one expert's gate, up and down; `shared` is that of the expert for all tokens."""
    modules = {"router": f"{block}.gate", "router.bias": f"{block}.moe_statics.e_score_correction_bias"}
    if shared:
        modules |= {f"shared_{module}": f"{block}.{shared}.{module}_proj" for module in ("gate", "up", "down")}
        modules["shared_expert_gate"] = f"{block}.{shared}_gate"
    return NameMap(
        _MODULES,
        "model.layers.{}.",
        _LAYER | modules,
        (*_IGNORED, *ignored),
        infixes=infixes,
        expert_modules={
            module: f"{block}.experts.{{}}.{name}" for module, name in zip(("gate", "up", "down"), experts, strict=True)
        },
        fused={f"{block}.experts.{name}": stacked for name, stacked in _FUSED.items()},
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
QWEN_MOE = _moe_names("mlp", _PROJECTIONS, "shared_expert")
ERNIE_MOE = _moe_names(
    "mlp",
    _PROJECTIONS,
    "shared_experts",
    (r"model\.mtp_.*",),  # layers that predict further tokens
    infixes=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
)
MIXTRAL = _moe_names("block_sparse_moe", ("w1", "w3", "w2"), infixes=((".mlp.", ".block_sparse_moe."),))

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
