"""The decoder family: one forward function over `Ops`, shaped by `DecoderConfig`.

Built by `loader.py` with packed weights; a backend calls `forward`. Knows neither checkpoint formats nor memory, and
never branches on a batch's contents (see `kernels/ops.py`). Where several ranks share a model, each computes its rows
of every matrix (`shard.py`), and what comes next needs all of them: `gather` puts them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kernels.ops import AttentionSpec, Experts, MoeSpec, Ops, Packed, RopeSpec, Tensor
from headrace.models.config import DecoderConfig
from headrace.models.shard import Shard


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
    gate_up: Packed | None  # of a dense layer
    down: Packed | None
    router: Packed | None  # of a layer with experts
    router_bias: Packed | None
    experts: Experts | None
    shared_gate_up: Packed | None
    shared_down: Packed | None
    shared_expert_gate: Packed | None
    mlp_post_norm: Packed | None
    moe: MoeSpec | None
    rope: RopeSpec
    attention: AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model in the sense of `kernels.ops.Model`."""

    config: DecoderConfig
    shard: Shard
    embed: Packed
    layers: Sequence[LayerWeights]
    final_norm: Packed
    head: Packed

    def forward(self, ops: Ops) -> Tensor:
        """Logits [R, V]."""
        config = self.config
        is_cut = self.shard.size > 1
        x = ops.embed(self.embed, self.shard.part(config.vocab_size).start if is_cut else None)
        if config.embedding_scale != 1.0:
            x = ops.scale(x, config.embedding_scale)
        for index, layer in enumerate(self.layers):
            x = ops.add(x, self._attention(ops, x, layer, index))
            x = ops.add(x, self._mlp(ops, x, layer))
        ops.hidden_rows(x, self.final_norm, config.rms_norm_eps)
        x = ops.logit_rows(x)
        x = ops.rms_norm(x, self.final_norm, config.rms_norm_eps)
        logits = ops.linear(x, self.head)
        if config.logit_soft_cap is not None:
            logits = ops.soft_cap(logits, config.logit_soft_cap)
        return self._gather(ops, logits, self.shard.sizes(config.vocab_size))

    def _gather(self, ops: Ops, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return ops.gather(x, sizes) if self.shard.size > 1 else x

    def _attention(self, ops: Ops, x: Tensor, layer: LayerWeights, index: int) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        shard, num_heads, num_kv_heads = self.shard, len(self.shard.q_heads), len(self.shard.kv_heads)
        q_size, kv_size = num_heads * config.head_dim, num_kv_heads * config.head_dim
        qkv = ops.linear(ops.rms_norm(x, layer.attn_norm, eps), layer.qkv)
        q, k, v = ops.split(qkv, (q_size, kv_size, kv_size))
        if config.qk_norm == "whole":
            q = self._norm_whole(ops, q, layer.q_norm, shard.attention_sizes)
            k = self._norm_whole(ops, k, layer.k_norm, shard.kv_sizes)
        q, k, v = ops.heads(q, num_heads), ops.heads(k, num_kv_heads), ops.heads(v, num_kv_heads)
        if config.qk_norm == "head":
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
        q, k = ops.rope(q, layer.rope), ops.rope(k, layer.rope)
        seen = self._gather(ops, ops.attention(q, k, v, index, layer.attention), shard.attention_sizes)
        out = self._gather(ops, ops.linear(seen, layer.o), shard.sizes(config.hidden_size))
        return out if layer.attn_post_norm is None else ops.rms_norm(out, layer.attn_post_norm, eps)

    def _norm_whole(self, ops: Ops, x: Tensor, weight: Packed, sizes: tuple[int, ...]) -> Tensor:
        """The norm over the heads of all ranks; this rank's part of the result."""
        if self.shard.size == 1:
            return ops.rms_norm(x, weight, self.config.rms_norm_eps)
        normed = ops.rms_norm(ops.gather(x, sizes), weight, self.config.rms_norm_eps)
        return ops.split(normed, sizes)[self.shard.rank]

    def _mlp(self, ops: Ops, x: Tensor, layer: LayerWeights) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        x = ops.rms_norm(x, layer.mlp_norm, eps)
        if layer.experts is None:
            out = self._gated(ops, x, layer.gate_up, layer.down, config.intermediate_size)
        else:
            out = self._moe(ops, x, layer, layer.experts)
        return out if layer.mlp_post_norm is None else ops.rms_norm(out, layer.mlp_post_norm, eps)

    def _gated(self, ops: Ops, x: Tensor, gate_up: Packed, down: Packed, inner_size: int) -> Tensor:
        own_size = len(self.shard.part(inner_size))
        gate, up = ops.split(ops.linear(x, gate_up), (own_size, own_size))
        inner = self._gather(ops, ops.gated(gate, up, self.config.activation), self.shard.sizes(inner_size))
        return self._gather(ops, ops.linear(inner, down), self.shard.sizes(self.config.hidden_size))

    def _moe(self, ops: Ops, x: Tensor, layer: LayerWeights, experts: Experts) -> Tensor:
        moe = self.config.moe
        assert moe is not None, "a model with experts says so"
        assert layer.moe is not None, "and so do its layers"
        out = ops.moe(x, ops.linear(x, layer.router), layer.router_bias, experts, layer.moe)
        if not moe.shared_size:
            return out
        shared = self._gated(ops, x, layer.shared_gate_up, layer.shared_down, moe.shared_size)
        if moe.has_shared_gate:
            shared = ops.gate_rows(shared, ops.linear(x, layer.shared_expert_gate))
        return ops.add(out, shared)
