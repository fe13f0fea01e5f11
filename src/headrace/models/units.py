"""What is packed together: each unit is one weight of the decoder, made of one tensor or of several stacked ones.

Loading (`loader.py`) and refreshing (`stage.py`) go through the same units, so that weights that came later are packed
as those that were there at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from headrace.errors import InvalidRequest
from headrace.kernels.ops import (
    AttentionSpec,
    Backend,
    Experts,
    Formats,
    MoeSpec,
    Packed,
    Packer,
    RoutingSpec,
)
from headrace.models.config import DecoderConfig, MoeConfig
from headrace.models.decoder import Decoder, LayerWeights
from headrace.models.fused import fused_parts
from headrace.models.names.base import NameMap
from headrace.models.plan import Shape, expected_tensors
from headrace.models.rope import rope_spec
from headrace.models.shard import Shard
from headrace.weights.tensor import CheckpointTensor

_NORMS = ("attn_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
_STACKED = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "router": ("router",),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "shared_down": ("shared_down",),
    "shared_expert_gate": ("shared_expert_gate",),
}
_EXACT = ("router", "shared_expert_gate")
"""What decides more than it costs: kept in float32, however the other weights are rounded."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors by our names, in the order in which they are stacked; `biases` is empty or has one per weight."""

    kind: Literal["table", "linear", "norm", "vector"]
    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    formats: Formats = ()  # that it is always packed in

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.weights + self.biases

    def pack(self, given: Mapping[str, Any], packer: Packer, config: DecoderConfig, formats: Formats = ()) -> Packed:
        """`given` has a tensor, or a part that is packed already, for each name."""
        weights, formats = [given[name] for name in self.weights], self.formats or formats
        if self.kind == "table":
            return packer.pack_table(weights[0], formats)
        if self.kind == "linear":
            return packer.pack_linear(weights, [given[name] for name in self.biases] or None, formats)
        weight = weights[0]
        if self.kind == "norm" and isinstance(weight, CheckpointTensor) and config.norm_offset:
            weight = CheckpointTensor.from_floats(weight.name, weight.dequantize() + np.float32(config.norm_offset))
        return packer.pack_vector(weight)


def units_of(config: DecoderConfig) -> dict[str, Unit]:
    """By the name that `WeightSet` knows them under."""
    expected = expected_tensors(config)
    units = {"embed": Unit("table", ("embed.weight",)), "final_norm": Unit("norm", ("final_norm.weight",))}
    if not config.has_tied_head:
        units["head"] = Unit("linear", ("head.weight",), ("head.bias",) if config.has_head_bias else ())
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for name in _NORMS:
            if f"{prefix}{name}.weight" in expected:
                units[prefix + name] = Unit("norm", (f"{prefix}{name}.weight",))
        for name, modules in _STACKED.items():
            weights = tuple(f"{prefix}{module}.weight" for module in modules)
            biases = tuple(f"{prefix}{module}.bias" for module in modules if name != "router")
            if weights[0] in expected:
                formats = ("f32",) if name in _EXACT else ()
                biases = biases if biases and biases[0] in expected else ()
                units[prefix + name] = Unit("linear", weights, biases, formats)
        if config.moe is not None and config.is_moe(layer):
            units |= _expert_units(config.moe, prefix)
    return units


def _expert_units(moe: MoeConfig, prefix: str) -> dict[str, Unit]:
    """Two for each expert, so that each can be held, moved or replaced alone."""
    units = {f"{prefix}router_bias": Unit("vector", (f"{prefix}router.bias",))} if moe.has_routing_bias else {}
    for e in range(moe.num_experts):
        expert = f"{prefix}experts.{e}."
        units[f"{expert}gate_up"] = Unit("linear", (f"{expert}gate.weight", f"{expert}up.weight"))
        units[f"{expert}down"] = Unit("linear", (f"{expert}down.weight",))
    return units


@dataclass(frozen=True)
class Layout:
    """How a source lays tensors out (rope pairs, norm offsets, ties) and what it calls them."""

    config: DecoderConfig
    names: NameMap

    def is_like(self, other: Layout) -> bool:
        """Whether a tensor of one means the same in the other."""
        ours, theirs = self.config, other.config
        return (
            self.names == other.names
            and ours.rope.is_interleaved == theirs.rope.is_interleaved
            and ours.norm_offset == theirs.norm_offset
            and ours.has_tied_head == theirs.has_tied_head
        )

    @cached_property
    def our_names(self) -> dict[str, str]:
        """By the source's names. The head's is known where it is tied, too: it may be sent along."""
        return {self.names.source_name(name): name for name in (*self.shapes, "head.weight")}

    def find(self, source_name: str) -> list[str]:
        """Our names of what one of the source's holds: several for a tensor with all experts of a layer, in their
        order; none for an unknown name."""
        moe = self.config.moe
        fused = None if moe is None else fused_parts(source_name, moe, self.names)
        if fused is not None:
            return fused
        ours = self.our_names.get(self.names.normalise(source_name))
        return [] if ours is None else [ours]

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Of all tensors, by our names."""
        return expected_tensors(self.config)

    @cached_property
    def units(self) -> Mapping[str, Unit]:
        """By the name that `WeightSet` knows them under."""
        return units_of(self.config)

    @cached_property
    def unit_of(self) -> Mapping[str, str]:
        """By our tensor names."""
        return {name: unit for unit, members in self.units.items() for name in members.tensors}


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One whole set of packed weights, or one rank's shard of it. Never changed: a refresh makes a new one."""

    layout: Layout
    handles: Mapping[str, Packed]  # by unit
    shard: Shard

    def formats(self, backend: Backend) -> dict[str, Formats]:
        """By unit."""
        return {unit: backend.formats(handle) for unit, handle in self.handles.items()}

    def num_bytes(self, backend: Backend) -> int:
        """In memory."""
        parts = [part for handle in self.handles.values() for part in backend.parts(handle)[0]]
        return sum(getattr(part, "num_bytes", None) or part.nbytes for part in parts)

    def source_names(self) -> list[str]:
        """Of all tensors, as their source calls them."""
        return [self.layout.names.source_name(name) for name in self.layout.shapes]

    def part(self, backend: Backend, name: str) -> Any:
        """The packed part that one of our tensor names stands for; KeyError if there is none on this rank."""
        if name == "head.weight" and self.layout.config.has_tied_head:
            name = "embed.weight"
        unit_name = self.layout.unit_of[name]
        unit = self.layout.units[unit_name]
        weights, biases = backend.parts(self.handles[unit_name])
        return weights[unit.weights.index(name)] if biases is None else (weights + biases)[unit.tensors.index(name)]

    def values(self, backend: Backend, name: str) -> np.ndarray:
        """A tensor as the weights in use stand for it, float32 in the checkpoint's shape; this rank's rows of it."""
        values = backend.unpack(self.part(backend, name))
        is_norm = name.endswith("norm.weight")
        return values - np.float32(self.layout.config.norm_offset) if is_norm else values

    def read(self, source_name: str, read_one: Callable[[str], np.ndarray]) -> np.ndarray | None:
        """A tensor by the source's name, whose parts `read_one` gets by ours: experts that are one tensor there are put
        together. None if unknown."""
        names, moe = self.layout.find(source_name), self.layout.config.moe
        values = [read_one(name) for name in names]
        if len(values) < 2 or moe is None:
            return values[0] if values else None
        return np.stack(values).reshape(moe.num_experts, -1, values[0].shape[1])

    def differing(self, other: WeightSet, backend: Backend) -> list[str]:
        """Names of tensors that are not equal, as this set's source calls them. Raises InvalidRequest if the two are
        laid out differently, where equal tensors would look different."""
        if not self.layout.is_like(other.layout):
            raise InvalidRequest("The two are laid out differently (one comes from a GGUF file, say).", param="path")
        return [
            self.layout.names.source_name(name)
            for name, unit in ((name, self.layout.unit_of[name]) for name in self.layout.shapes)
            if unit in self.handles
            and not np.array_equal(self.values(backend, name), other.values(backend, name), equal_nan=True)
        ]

    def decoder(self, backend: Backend) -> Decoder:
        """The model over these weights."""
        config, handles, shard = self.layout.config, self.handles, self.shard
        moe = _moe_spec(config, shard)
        ropes = {rope: rope_spec(rope) for rope in (config.rope, config.local_rope) if rope is not None}

        def layer(index: int) -> LayerWeights:
            return LayerWeights(
                **{name: handles.get(f"layers.{index}.{name}") for name in (*_NORMS, *_STACKED, "router_bias")},
                experts=self._experts(backend, index),
                moe=moe if config.is_moe(index) else None,
                rope=ropes[config.layer_rope(index)],
                attention=AttentionSpec(
                    num_heads=len(shard.q_heads),
                    num_kv_heads=len(shard.kv_heads),
                    head_dim=config.head_dim,
                    scale=config.attention_scale or config.head_dim**-0.5,
                    sliding_window=config.sliding_window if config.is_sliding(index) else None,
                    soft_cap=config.attention_soft_cap,
                ),
            )

        return Decoder(
            config=config,
            shard=shard,
            embed=handles["embed"],
            layers=[layer(index) for index in range(config.num_layers)],
            final_norm=handles["final_norm"],
            head=handles["embed"] if config.has_tied_head else handles["head"],
        )

    def _experts(self, backend: Backend, layer: int) -> Experts | None:
        """Placed as the shard says."""
        config = self.layout.config
        if config.moe is None or not config.is_moe(layer):
            return None
        experts = backend.experts(config.moe.num_experts)
        experts.place(self.shard.slots(layer), self.held_experts(layer))
        return experts

    def held_experts(self, layer: int) -> dict[int, tuple[Packed, Packed]]:
        """Gate and up, and down, by the slots of a layer that this rank computes."""
        slots_P, own = self.shard.slots(layer), self.shard.own_slots
        names = {slot: f"layers.{layer}.experts.{slots_P[slot]}." for slot in range(*own.indices(len(slots_P)))}
        return {slot: (self.handles[f"{name}gate_up"], self.handles[f"{name}down"]) for slot, name in names.items()}


def _moe_spec(config: DecoderConfig, shard: Shard) -> MoeSpec | None:
    moe = config.moe
    if moe is None:
        return None
    routing = RoutingSpec(
        num_experts=moe.num_experts,
        num_per_token=moe.num_experts_per_token,
        scoring=moe.scoring,
        is_normalised=moe.is_normalised,
        norm_floor=moe.norm_floor,
        scale=moe.scale,
        num_groups=moe.num_groups,
        num_groups_used=moe.num_groups_used,
        num_per_group_score=moe.num_per_group_score,
    )
    is_cut = shard.size > 1 and shard.experts is None
    return MoeSpec(
        routing=routing,
        activation=config.activation,
        inner_size=moe.expert_size,
        inner_sizes=shard.sizes(moe.expert_size) if is_cut else (),
        output_sizes=shard.sizes(config.hidden_size) if is_cut else (),
    )
