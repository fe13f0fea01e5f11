"""What the decoder is made of: `DecoderConfig`, a frozen description that no checkpoint format shows through.

Made by `from_hf.py` and `from_gguf.py`, read by `plan.py` (which tensors must exist) and `decoder.py` (what to
compute).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import CheckpointError

MAX_EXPERTS = 4096  # of one layer
MAX_EXPERTS_IN_ALL = 1 << 17  # so that a corrupt number cannot ask for millions of tensors
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; `rope.py` turns it into frequencies."""

    theta: float
    rotary_dim: int  # of head_dim, the part that turns
    is_interleaved: bool = False
    scaling: str = "default"  # default, linear, dynamic, llama3, yarn
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn
    is_truncated: bool = True  # yarn: the correction range is rounded to whole dimensions
    divisors: tuple[float, ...] | None = None  # of each frequency, where the file carries them


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: which layers have it, how their router chooses, what else they hold."""

    moe_layers: tuple[bool, ...]  # one per layer; the others are dense
    num_experts: int
    num_experts_per_token: int
    expert_size: int  # inner size of one expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True  # weights of the chosen experts are divided by their sum
    norm_floor: float = 0.0  # the least sum that they are divided by
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # only experts of the best groups can be chosen (DeepSeek-V3)
    num_groups_used: int = 1
    num_per_group_score: int = 1  # a group is worth the sum of its so many best experts
    has_routing_bias: bool = False  # added to the probabilities for the choice, not for the weights
    shared_size: int = 0  # inner size of the MLP that every token passes beside its experts; 0: none
    has_shared_gate: bool = False  # its output is scaled by the sigmoid of one number per token


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder-only transformer. The variants' defaults are Llama's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()
    activation: str = "silu"
    has_tied_head: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None  # each head of queries and keys is normed, or all together (OLMoE)
    has_post_norms: bool = False  # norms after attention and MLP too, before the residual sum (Gemma)
    norm_offset: float = 0.0  # added to stored norm weights (Gemma stores weight - 1)
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # one per layer; empty: none slides
    local_rope: RopeConfig | None = None  # of sliding layers, where it differs
    moe: MoeConfig | None = None

    def is_sliding(self, layer: int) -> bool:
        return bool(self.sliding_layers) and self.sliding_layers[layer]

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe.moe_layers[layer]

    def layer_rope(self, layer: int) -> RopeConfig:
        return self.local_rope if self.local_rope is not None and self.is_sliding(layer) else self.rope


def check_config(config: DecoderConfig, where: str) -> DecoderConfig:
    """The config itself, once its fields fit together; `where` names the file in the error."""

    def refuse(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: {what}")

    if config.num_heads % config.num_kv_heads:
        raise refuse(f"{config.num_heads} attention heads are no multiple of {config.num_kv_heads} key-value heads")
    for rope in (config.rope, config.local_rope):
        if rope is not None and (rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= config.head_dim):
            raise refuse(
                f"rotary dimension {rope.rotary_dim} of a head of {config.head_dim}; even and not more is allowed"
            )
        if rope is not None and rope.divisors is not None and len(rope.divisors) != rope.rotary_dim // 2:
            raise refuse(f"{len(rope.divisors)} rope frequency factors; {rope.rotary_dim // 2} are needed")
    if config.has_head_bias and config.has_tied_head:
        raise refuse("a head with a bias that is tied to the embedding; without a bias, or untied is allowed")
    if config.activation not in ACTIVATIONS:
        raise refuse(f"activation {config.activation[:40]!r}; allowed: {', '.join(ACTIVATIONS)}")
    if config.sliding_layers and len(config.sliding_layers) != config.num_layers:
        raise refuse(f"{len(config.sliding_layers)} layer types for {config.num_layers} layers")
    if any(config.sliding_layers) and config.sliding_window is None:
        raise refuse("some layers slide, but there is no sliding_window")
    if any(not 0 <= token_id < config.vocab_size for token_id in config.eos_token_ids):
        raise refuse(f"EOS token ids {config.eos_token_ids} outside the vocabulary of {config.vocab_size}")
    if config.moe is not None and (problem := _moe_problem(config.moe, config.num_layers)):
        raise refuse(problem)
    return config


def _moe_problem(moe: MoeConfig, num_layers: int) -> str | None:
    """What does not fit together, if anything."""
    if len(moe.moe_layers) != num_layers:
        return f"{len(moe.moe_layers)} entries say which layers have experts, for {num_layers} layers"
    num_in_all = sum(moe.moe_layers) * moe.num_experts
    if num_in_all > MAX_EXPERTS_IN_ALL:
        return f"{num_in_all} experts in all layers; up to {MAX_EXPERTS_IN_ALL} are allowed"
    if moe.num_experts % moe.num_groups:
        return f"{moe.num_experts} experts are no multiple of {moe.num_groups} expert groups"
    group_size = moe.num_experts // moe.num_groups
    if not 1 <= moe.num_groups_used <= moe.num_groups:
        return f"{moe.num_groups_used} expert groups are used; 1 to {moe.num_groups} are allowed"
    if not 1 <= moe.num_per_group_score <= group_size:
        return f"{moe.num_per_group_score} experts make a group's score; 1 to {group_size} are allowed"
    num_choices = moe.num_groups_used * group_size
    if not 1 <= moe.num_experts_per_token <= num_choices:
        return f"{moe.num_experts_per_token} experts per token; 1 to {num_choices} are allowed"
    if moe.has_shared_gate and not moe.shared_size:
        return "a gate of the shared expert, but no shared expert"
    return None
