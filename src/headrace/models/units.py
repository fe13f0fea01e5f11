"""What is packed together: each unit is one weight of the decoder, made of one tensor or of several stacked ones.

Loading (`loader.py`) and refreshing (`stage.py`) go through the same units, so that weights that came later are packed
as those that were there at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from headrace.errors import InvalidRequest
from headrace.kernels.ops import AttentionSpec, Backend, Formats, Packed, Packer
from headrace.models.config import DecoderConfig
from headrace.models.decoder import Decoder, LayerWeights
from headrace.models.names.base import NameMap
from headrace.models.plan import expected_tensors
from headrace.models.rope import rope_spec
from headrace.weights.tensor import CheckpointTensor

_NORMS = ("attn_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
_STACKED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors by our names, in the order in which they are stacked; `biases` is empty or has one per weight."""

    kind: Literal["table", "linear", "norm"]
    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.weights + self.biases

    def pack(self, given: Mapping[str, Any], packer: Packer, config: DecoderConfig, formats: Formats = ()) -> Packed:
        """`given` has a tensor, or a part that is packed already, for each name."""
        weights = [given[name] for name in self.weights]
        if self.kind == "table":
            return packer.pack_table(weights[0], formats)
        if self.kind == "linear":
            return packer.pack_linear(weights, [given[name] for name in self.biases] or None, formats)
        weight = weights[0]
        if isinstance(weight, CheckpointTensor) and config.norm_offset:
            weight = CheckpointTensor.from_floats(weight.name, weight.dequantize() + np.float32(config.norm_offset))
        return packer.pack_vector(weight)


def units_of(config: DecoderConfig) -> dict[str, Unit]:
    """By the name that `WeightSet` knows them under."""
    expected = expected_tensors(config)
    units = {"embed": Unit("table", ("embed.weight",)), "final_norm": Unit("norm", ("final_norm.weight",))}
    if not config.has_tied_head:
        units["head"] = Unit("linear", ("head.weight",))
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for name in _NORMS:
            if f"{prefix}{name}.weight" in expected:
                units[prefix + name] = Unit("norm", (f"{prefix}{name}.weight",))
        for name, modules in _STACKED.items():
            weights = tuple(f"{prefix}{module}.weight" for module in modules)
            biases = tuple(f"{prefix}{module}.bias" for module in modules)
            units[prefix + name] = Unit("linear", weights, biases if biases[0] in expected else ())
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
        return {self.names.source_name(name): name for name in (*expected_tensors(self.config), "head.weight")}


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One whole set of packed weights. Never changed: a refresh makes a new one."""

    layout: Layout
    handles: Mapping[str, Packed]  # by unit

    def formats(self, backend: Backend) -> dict[str, Formats]:
        """By unit."""
        return {unit: backend.formats(handle) for unit, handle in self.handles.items()}

    def num_bytes(self, backend: Backend) -> int:
        """In memory."""
        parts = [part for handle in self.handles.values() for part in backend.parts(handle)[0]]
        return sum(getattr(part, "num_bytes", None) or part.nbytes for part in parts)

    def source_names(self) -> list[str]:
        """Of all tensors, as their source calls them."""
        return [self.layout.names.source_name(name) for name in expected_tensors(self.layout.config)]

    def part(self, backend: Backend, name: str) -> Any:
        """The packed part that one of our tensor names stands for; KeyError if there is none."""
        if name == "head.weight" and self.layout.config.has_tied_head:
            name = "embed.weight"
        unit_name, index, is_bias = _find(units_of(self.layout.config), name)
        weights, biases = backend.parts(self.handles[unit_name])
        return biases[index] if is_bias and biases is not None else weights[index]

    def values(self, backend: Backend, name: str) -> np.ndarray:
        """A tensor as the weights in use stand for it, float32 in the checkpoint's shape."""
        values = backend.unpack(self.part(backend, name))
        is_norm = name.endswith("norm.weight")
        return values - np.float32(self.layout.config.norm_offset) if is_norm else values

    def differing(self, other: WeightSet, backend: Backend) -> list[str]:
        """Names of tensors that are not equal, as this set's source calls them. Raises InvalidRequest if the two are
        laid out differently, where equal tensors would look different."""
        if not self.layout.is_like(other.layout):
            raise InvalidRequest("The two are laid out differently (one comes from a GGUF file, say).", param="path")
        names = expected_tensors(self.layout.config)
        return [
            self.layout.names.source_name(name)
            for name in names
            if not np.array_equal(self.values(backend, name), other.values(backend, name), equal_nan=True)
        ]

    def decoder(self) -> Decoder:
        config, handles = self.layout.config, self.handles
        ropes = {rope: rope_spec(rope) for rope in (config.rope, config.local_rope) if rope is not None}

        def layer(index: int) -> LayerWeights:
            return LayerWeights(
                **{name: handles.get(f"layers.{index}.{name}") for name in (*_NORMS, *_STACKED)},
                rope=ropes[config.layer_rope(index)],
                attention=AttentionSpec(
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    scale=config.attention_scale or config.head_dim**-0.5,
                    sliding_window=config.sliding_window if config.is_sliding(index) else None,
                    soft_cap=config.attention_soft_cap,
                ),
            )

        return Decoder(
            config=config,
            embed=handles["embed"],
            layers=[layer(index) for index in range(config.num_layers)],
            final_norm=handles["final_norm"],
            head=handles["embed"] if config.has_tied_head else handles["head"],
        )


def _find(units: Mapping[str, Unit], name: str) -> tuple[str, int, bool]:
    for unit_name, unit in units.items():
        if name in unit.weights:
            return unit_name, unit.weights.index(name), False
        if name in unit.biases:
            return unit_name, unit.biases.index(name), True
    raise KeyError(name)
