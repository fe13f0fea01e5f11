"""Which logical expert lives in which physical slot: the map that is in force, or one that could be.

Slot s of a layer lives on rank s // (P / R). Dispatch sends a token to one of its expert's replicas.

Shapes: L layers, E logical experts, P slots, R ranks, S = P / R slots of a rank, C most copies of any expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import msgspec
import numpy as np

from headrace.eplb.placement import Slots
from headrace.errors import ConfigError, InvalidRequest


class MapData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `ExpertMap` as JSON."""

    num_experts: int
    num_ranks: int
    slots: list[list[int]]  # [layer][slot]


@dataclass(frozen=True, eq=False)
class ExpertMap:
    """A placement of all layers; its arrays cannot be written. Raises InvalidRequest as `check` does."""

    slots_LP: Slots
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        slots_LP = np.array(self.slots_LP, dtype=np.int32)
        object.__setattr__(self, "slots_LP", _frozen(slots_LP))
        self.check()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExpertMap)
            and (self.num_experts, self.num_ranks) == (other.num_experts, other.num_ranks)
            and np.array_equal(self.slots_LP, other.slots_LP)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by its arrays

    @property
    def num_layers(self) -> int:
        return int(self.slots_LP.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.slots_LP.shape[1])

    @property
    def num_redundant(self) -> int:
        return self.num_slots - self.num_experts

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def slots_LRS(self) -> Slots:
        """The same by rank."""
        return self.slots_LP.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)

    @cached_property
    def num_replicas_LE(self) -> Slots:
        return _frozen(count_replicas(self.slots_LP, self.num_experts))

    @cached_property
    def replicas_LEC(self) -> Slots:
        """The slots of each expert in ascending order, padded with -1."""
        width = int(self.num_replicas_LE.max())
        replicas_LEC = np.full((self.num_layers, self.num_experts, width), -1, dtype=np.int32)
        slot_LP = np.argsort(self.slots_LP, axis=1, kind="stable")  # by expert, and by slot within one
        expert_LP = np.take_along_axis(self.slots_LP, slot_LP, axis=1)
        before_LE = np.cumsum(self.num_replicas_LE, axis=1) - self.num_replicas_LE
        copy_LP = np.arange(self.num_slots) - np.take_along_axis(before_LE, expert_LP, axis=1)
        replicas_LEC[np.arange(self.num_layers)[:, None], expert_LP, copy_LP] = slot_LP
        return _frozen(replicas_LEC)

    def check(self) -> None:
        """Raises InvalidRequest if this is no map: sizes, ids out of range, an expert that lives nowhere."""
        slots_LP = self.slots_LP
        if slots_LP.ndim != 2 or 0 in slots_LP.shape:
            raise _wrong(f"slots have the shape {list(slots_LP.shape)}; they must be layers x slots, at least 1 x 1")
        if self.num_ranks < 1 or slots_LP.shape[1] % self.num_ranks:
            raise _wrong(f"num_ranks is {self.num_ranks}; it must divide the {slots_LP.shape[1]} slots", "num_ranks")
        if not 1 <= self.num_experts <= slots_LP.shape[1]:
            raise _wrong(f"num_experts is {self.num_experts}; it must be 1 to {slots_LP.shape[1]}", "num_experts")
        outside = (slots_LP < 0) | (slots_LP >= self.num_experts)
        if outside.any():
            layer, slot = np.argwhere(outside)[0].tolist()
            raise _wrong(f"slots[{layer}][{slot}] is {slots_LP[layer, slot]}; it must be 0 to {self.num_experts - 1}")
        missing = self.num_replicas_LE == 0
        if missing.any():
            layer, expert = np.argwhere(missing)[0].tolist()
            raise _wrong(f"slots[{layer}] hold no copy of expert {expert}; each expert needs at least one slot")

    def to_data(self) -> MapData:
        return MapData(self.num_experts, self.num_ranks, self.slots_LP.tolist())

    @classmethod
    def from_data(cls, data: MapData) -> Self:
        """Raises InvalidRequest."""
        if len({len(row) for row in data.slots}) > 1:
            raise _wrong("slots have rows of different lengths; each layer must have the same number of slots")
        try:
            slots_LP = np.array(data.slots, dtype=np.int32)
        except OverflowError as error:
            raise _wrong(f"slots hold a number that is no expert: {error}") from error
        return cls(slots_LP, data.num_experts, data.num_ranks)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.to_data())

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Raises InvalidRequest."""
        try:
            data = msgspec.json.decode(text, type=MapData)
        except msgspec.MsgspecError as error:  # malformed JSON, or another shape
            raise _wrong(f"no expert map: {error}") from error
        return cls.from_data(data)


def initial_map(num_layers: int, num_experts: int, num_redundant: int, num_ranks: int) -> ExpertMap:
    """The map before anything was measured: experts in order, then redundant slots round robin. Raises ConfigError."""
    if num_layers < 1 or num_experts < 1:
        raise ConfigError(f"a map needs at least 1 layer and 1 expert, not {num_layers} and {num_experts}")
    check_redundant(num_experts, num_redundant, num_ranks)
    slots_P = np.arange(num_experts + num_redundant, dtype=np.int32) % num_experts
    return ExpertMap(np.tile(slots_P, (num_layers, 1)), num_experts, num_ranks)


def check_redundant(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    """Raises ConfigError unless all ranks get equally many slots, and no expert more copies than there are ranks."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}; it must be at least 1")
    least, most = -num_experts % num_ranks, num_experts * (num_ranks - 1)
    if (num_experts + num_redundant) % num_ranks == 0 and 0 <= num_redundant <= most:
        return
    allowed = [str(count) for count in range(least, most + 1, num_ranks)[:4]]
    listed = f"{', '.join(allowed)}{', ...' if least + 4 * num_ranks <= most else ''}" if allowed else "none"
    raise ConfigError(
        f"num_redundant_experts is {num_redundant}: {num_experts} experts and the redundant ones must divide evenly "
        f"among {num_ranks} ranks; allowed: {listed} (at most {most})"
    )


def count_replicas(slots_LP: Slots, num_experts: int) -> Slots:
    """How many slots each expert has, [L, E]."""
    num_layers = len(slots_LP)
    keys = slots_LP + np.arange(num_layers)[:, None] * num_experts
    counts = np.bincount(keys.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.int32)


def _frozen(array: Slots) -> Slots:
    array.flags.writeable = False
    return array


def _wrong(message: str, param: str = "slots") -> InvalidRequest:
    return InvalidRequest(message, param=param)
