"""Tensor names of GGUF files (llama.cpp's)."""

from __future__ import annotations

from headrace.models.names.base import NameMap

_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "router.bias": "exp_probs_b.bias",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
}

GGUF = NameMap(
    {"embed": "token_embd", "final_norm": "output_norm", "head": "output"},
    "blk.{}.",
    _LAYER,
    # rope_freqs.weight is read by the config mapper.
    (r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd", r"blk\.\d+\.rope_freqs\.weight"),
    # One tensor per expert is what the oldest files have; later ones hold all experts in one.
    expert_modules={"gate": "ffn_gate.{}", "up": "ffn_up.{}", "down": "ffn_down.{}"},
    fused={
        "ffn_gate_exps.weight": ("gate",),
        "ffn_up_exps.weight": ("up",),
        "ffn_down_exps.weight": ("down",),
        "ffn_gate_up_exps.weight": ("gate", "up"),
    },
)
