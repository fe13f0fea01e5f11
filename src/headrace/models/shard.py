"""What one of several ranks holds of a model: rows of every matrix and, with expert parallelism, whole experts.

Matrices are cut along their outputs alone and what ranks compute is put side by side, never added up: so each number
has one order of sums, and the bits of an answer do not depend on how many ranks there are. (Megatron's sharding,
arXiv 1909.08053, saves half of the exchanges by adding partial products, and changes the bits.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from headrace.eplb.layout import ExpertMap, MapData, initial_map
from headrace.errors import ConfigError, InvalidRequest
from headrace.models.config import DecoderConfig
from headrace.weights.tensor import CheckpointTensor

_TILE = 16
"""Outputs that the compiled kernels compute together: parts are whole tiles, where there are enough of them."""

_BY_HEADS = frozenset({"q", "k", "v"})
_BY_INNER = frozenset({"gate", "up", "shared_gate", "shared_up"})
_BY_HIDDEN = frozenset({"o", "down", "shared_down"})
_BY_VOCABULARY = frozenset({"embed", "head"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is spread over ranks, before it is known."""

    rank: int = 0
    size: int = 1
    has_whole_experts: bool = False  # experts are spread over the ranks, each on one; else every expert is cut
    num_redundant: int = 0  # slots for second copies of experts, over all ranks; with `slots`, 0: as many as it has
    slots: list[list[int]] | None = None  # the expert in each slot, by layer with experts; None: in order


@dataclass(frozen=True)
class Shard:
    """One rank's part of one model. `experts` is None where every rank has a part of every expert."""

    config: DecoderConfig
    rank: int = 0
    size: int = 1
    experts: ExpertMap | None = field(default=None)

    @classmethod
    def of(cls, config: DecoderConfig, sharding: Sharding) -> Shard:
        """Raises ConfigError where the model has too little of something to be cut that often."""
        size = sharding.size
        if size > 1:
            _check_size(config, size)
        experts = None
        if config.moe is None and (sharding.slots is not None or sharding.num_redundant):
            option = "--redundant-experts" if sharding.slots is None else "--expert-map"
            raise ConfigError(f"{option} is not possible: {config.architecture} has no experts")
        if sharding.has_whole_experts and config.moe is not None:
            num_layers = sum(map(config.is_moe, range(config.num_layers)))
            experts = _first_map(sharding, num_layers, config.moe.num_experts)
        return cls(config, sharding.rank, size, experts)

    def with_experts(self, experts: ExpertMap) -> Shard:
        return replace(self, experts=experts)

    # --------------------------------------------------------------------------------------------------------- numbers

    @property
    def kv_heads(self) -> range:
        """KV heads of this rank. More ranks than KV heads share one each."""
        num_kv, size = self.config.num_kv_heads, self.size
        if size > num_kv:
            first = self.rank // (size // num_kv)
            return range(first, first + 1)
        return _part(num_kv, self.rank, size)

    @property
    def q_heads(self) -> range:
        config, kv = self.config, self.kv_heads
        if self.size > config.num_kv_heads:
            return _part(config.num_heads, self.rank, self.size)
        per_kv = config.num_heads // config.num_kv_heads
        return range(kv.start * per_kv, kv.stop * per_kv)

    def part(self, total: int) -> range:
        """This rank's rows of a matrix with so many outputs."""
        return _rows(total, self.rank, self.size)

    def sizes(self, total: int) -> tuple[int, ...]:
        """How many rows each rank has of a matrix with so many outputs."""
        return tuple(len(_rows(total, rank, self.size)) for rank in range(self.size))

    @cached_property
    def ranks(self) -> tuple[Shard, ...]:
        """Of all ranks."""
        return tuple(replace(self, rank=rank) for rank in range(self.size))

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """Numbers that each rank's query heads give."""
        return tuple(len(shard.q_heads) * self.config.head_dim for shard in self.ranks)

    @property
    def kv_sizes(self) -> tuple[int, ...]:
        return tuple(len(shard.kv_heads) * self.config.head_dim for shard in self.ranks)

    # --------------------------------------------------------------------------------------------------------- tensors

    def rows(self, name: str, total: int) -> range:
        """Which rows of one of our tensors (models/names/base.py) this rank holds; of an expert, if it does at all."""
        module = name.split(".")[-2]
        if self.size == 1:
            return range(total)
        if module in _BY_HEADS:
            heads, dim = self.q_heads if module == "q" else self.kv_heads, self.config.head_dim
            return range(heads.start * dim, heads.stop * dim)
        if ".experts." in name and self.experts is not None:
            return range(total)
        if module in _BY_INNER or module in _BY_HIDDEN or module in _BY_VOCABULARY:
            return self.part(total)
        return range(total)

    def cut(self, name: str, tensor: CheckpointTensor) -> CheckpointTensor:
        """This rank's rows of a tensor, as a view."""
        rows = self.rows(name, tensor.shape[0])
        return tensor if len(rows) == tensor.shape[0] else tensor.rows(rows)

    def copies_of(self, name: str) -> int:
        """How many ranks in a row hold the same rows of a tensor that is cut."""
        is_of_kv = name.split(".")[-2] in ("k", "v")
        return max(1, self.size // self.config.num_kv_heads) if is_of_kv else 1

    def holds(self, unit: str) -> bool:
        """Whether this rank has a part of a unit (models/units.py)."""
        parts = unit.split(".")
        if self.experts is None or len(parts) < 3 or parts[2] != "experts":
            return True
        return int(parts[3]) in self._held[self.moe_index[int(parts[1])]]

    # --------------------------------------------------------------------------------------------------------- experts

    @cached_property
    def moe_index(self) -> dict[int, int]:
        """Row of the expert map, by layer."""
        layers = [layer for layer in range(self.config.num_layers) if self.config.is_moe(layer)]
        return {layer: index for index, layer in enumerate(layers)}

    @property
    def own_slots(self) -> slice:
        """Of each layer with experts, those that this rank computes."""
        if self.experts is None:
            return slice(None)
        each = self.experts.slots_per_rank
        return slice(self.rank * each, (self.rank + 1) * each)

    @cached_property
    def _held(self) -> tuple[frozenset[int], ...]:
        """Experts that lie in this rank's slots, by row of the map."""
        assert self.experts is not None, "asked where experts are spread"
        return tuple(frozenset(row) for row in self.experts.slots_LP[:, self.own_slots].tolist())

    def held_experts(self, layer: int) -> frozenset[int]:
        """Of a layer, where whole experts are spread over the ranks."""
        return self._held[self.moe_index[layer]]

    def slots(self, layer: int) -> np.ndarray:
        """The expert in each slot of a layer: [P]."""
        assert self.config.moe is not None, "asked of layers with experts"
        if self.experts is None:
            return np.arange(self.config.moe.num_experts)
        slots_P: np.ndarray = self.experts.slots_LP[self.moe_index[layer]]
        return slots_P


def _part(total: int, rank: int, size: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)


def _rows(total: int, rank: int, size: int) -> range:
    num_tiles = -(-total // _TILE)
    if num_tiles < size:
        return _part(total, rank, size)
    tiles = _part(num_tiles, rank, size)
    return range(tiles.start * _TILE, min(total, tiles.stop * _TILE))


def _first_map(sharding: Sharding, num_layers: int, num_experts: int) -> ExpertMap:
    if sharding.slots is None:
        return initial_map(num_layers, num_experts, sharding.num_redundant, sharding.size)
    num_slots = len(sharding.slots[0]) if sharding.slots else 0
    if num_slots < num_experts:
        raise ConfigError(f"--expert-map has {num_slots} slots in a row; the model has {num_experts} experts")
    try:
        experts = ExpertMap.from_data(MapData(num_experts, sharding.size, sharding.slots))
    except InvalidRequest as error:
        raise ConfigError(f"--expert-map is not possible: {error}") from None
    if experts.num_layers != num_layers:
        raise ConfigError(f"--expert-map has {experts.num_layers} rows; the model has {num_layers} layers with experts")
    if sharding.num_redundant and experts.num_redundant != sharding.num_redundant:
        raise ConfigError(
            f"--expert-map has {experts.num_redundant} redundant slots; --redundant-experts is {sharding.num_redundant}"
        )
    return experts


def _check_size(config: DecoderConfig, size: int) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if size > kv_heads and (size % kv_heads or heads % size or config.qk_norm == "whole"):
        raise ConfigError(
            f"--tensor-parallel-size {size} is not possible: the model has {heads} query heads and {kv_heads}"
            f" key-value heads; up to {kv_heads} ranks, or a multiple of that which divides {heads}, can share them"
        )
    moe = config.moe
    of_experts = [] if moe is None else [moe.expert_size, moe.shared_size or moe.expert_size]
    smallest = min(config.hidden_size, config.intermediate_size, *of_experts)
    if size > smallest:
        raise ConfigError(f"--tensor-parallel-size {size} is not possible: a matrix has only {smallest} rows")
