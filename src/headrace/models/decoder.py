"""The decoder family: one forward function over `Ops`, shaped by `DecoderConfig`.

Built by `loader.py` with packed weights; a backend calls `forward`. Knows neither checkpoint formats nor memory, and
never branches on a batch's contents (see `kernels/ops.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kernels.ops import AttentionSpec, Ops, Packed, RopeSpec, Tensor
from headrace.models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Packed weights of one layer; None where the variant has none."""

    attn_norm: Packed
    qkv: Packed
    q_norm: Packed | None
    k_norm: Packed | None
    o: Packed
    attn_post_norm: Packed | None
    mlp_norm: Packed
    gate_up: Packed
    down: Packed
    mlp_post_norm: Packed | None
    rope: RopeSpec
    attention: AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model in the sense of `kernels.ops.Model`."""

    config: DecoderConfig
    embed: Packed
    layers: Sequence[LayerWeights]
    final_norm: Packed
    head: Packed

    def forward(self, ops: Ops) -> Tensor:
        """Logits [R, V]."""
        config = self.config
        x = ops.embed(self.embed)
        if config.embedding_scale != 1.0:
            x = ops.scale(x, config.embedding_scale)
        for index, layer in enumerate(self.layers):
            x = ops.add(x, self._attention(ops, x, layer, index))
            x = ops.add(x, self._mlp(ops, x, layer))
        x = ops.logit_rows(x)
        x = ops.rms_norm(x, self.final_norm, config.rms_norm_eps)
        logits = ops.linear(x, self.head)
        return logits if config.logit_soft_cap is None else ops.soft_cap(logits, config.logit_soft_cap)

    def _attention(self, ops: Ops, x: Tensor, layer: LayerWeights, index: int) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = ops.linear(ops.rms_norm(x, layer.attn_norm, eps), layer.qkv)
        q, k, v = ops.split(qkv, (q_size, kv_size, kv_size))
        q, k, v = ops.heads(q, config.num_heads), ops.heads(k, config.num_kv_heads), ops.heads(v, config.num_kv_heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
        q, k = ops.rope(q, layer.rope), ops.rope(k, layer.rope)
        out = ops.linear(ops.attention(q, k, v, index, layer.attention), layer.o)
        return out if layer.attn_post_norm is None else ops.rms_norm(out, layer.attn_post_norm, eps)

    def _mlp(self, ops: Ops, x: Tensor, layer: LayerWeights) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)
        gate, up = ops.split(gate_up, (config.intermediate_size, config.intermediate_size))
        out = ops.linear(ops.gated(gate, up, config.activation), layer.down)
        return out if layer.mlp_post_norm is None else ops.rms_norm(out, layer.mlp_post_norm, eps)
