"""Experts on their way from rank to rank, seen from one of them: what it gives, and what it has taken.

An expert travels as the bytes of its packed matrices, one after the other, in pieces. Every matrix that belongs to an
expert goes: those of its two units (models/units.py), scales included, as they are packed.
"""

from __future__ import annotations

from typing import Any

from headrace.eplb.layout import ExpertMap
from headrace.executor.weights import PreparedMap, RankWeights
from headrace.kernels import Backend
from headrace.kernels.native import _native
from headrace.models.units import WeightSet
from headrace.transport.worker import ExpertPiece, PartShape

NICENESS = 10  # of the threads that move them: where all cores compute, steps go first
_UNITS = ("gate_up", "down")


class ExpertShelf:
    """One rank's. All but `place` happens beside the steps: weights in use are read, and none of them changes."""

    def __init__(self, weights: RankWeights, backend: Backend, group: _native.Group) -> None:
        self._weights = weights
        self._backend = backend
        self._shared = group.moves  # what one rank has written there, others read when it has said so
        self._taken: dict[tuple[int, int], list[Any]] = {}  # parts by layer and expert
        self._prepared: PreparedMap | None = None
        self._replaced: WeightSet | None = None  # kept until steps run again: giving memory back takes long

    def describe(self, layer: int, expert: int) -> list[PartShape]:
        """Of an expert that this rank holds."""
        return [PartShape(part.kind, part.rows, part.cols, part.num_bytes) for part in self._parts(layer, expert)]

    def give(self, pieces: list[ExpertPiece]) -> None:
        """Of experts that this rank holds."""
        for piece in pieces:
            self._copy(self._parts(piece.layer, piece.expert), piece, is_giving=True)

    def take(self, pieces: list[ExpertPiece], shapes: dict[str, list[PartShape]]) -> None:
        """What all ranks have given."""
        for piece in pieces:
            key = (piece.layer, piece.expert)
            if key not in self._taken:
                blank = self._backend.blank
                self._taken[key] = [blank(each.kind, each.rows, each.cols) for each in shapes["{}.{}".format(*key)]]
            self._copy(self._taken[key], piece, is_giving=False)

    def prepare(self, rows: dict[int, list[int]]) -> None:
        """For new rows of the map, by layer with experts. Everything that they want here is here, or was taken."""
        old = self._weights.shard.experts
        assert old is not None, "experts are spread over ranks"
        slots_LP = old.slots_LP.copy()
        for index, row in rows.items():
            slots_LP[index] = row
        experts = ExpertMap(slots_LP, old.num_experts, old.num_ranks)
        packer, units = self._backend.packer(), {}
        for (layer, expert), parts in self._taken.items():
            name = f"layers.{layer}.experts.{expert}."
            units[f"{name}gate_up"] = packer.pack_linear(parts[:-1])
            units[f"{name}down"] = packer.pack_linear(parts[-1:])
        self._taken.clear()
        self._prepared = self._weights.prepare(experts, units)

    def place(self) -> None:
        """Between two steps."""
        assert self._prepared is not None, "prepare comes first"
        prepared, self._prepared, self._replaced = self._prepared, None, self._weights.set
        self._weights.place(prepared)

    def drop(self) -> None:
        """What was taken or prepared, and what others have taken the place of."""
        self._taken.clear()
        self._prepared = self._replaced = None

    def _parts(self, layer: int, expert: int) -> list[Any]:
        weights = self._weights.set
        assert weights is not None, "experts move while there are weights"
        handles = [weights.handles[f"layers.{layer}.experts.{expert}.{unit}"] for unit in _UNITS]
        return [part for handle in handles for part in self._backend.parts(handle)[0]]

    def _copy(self, parts: list[Any], piece: ExpertPiece, *, is_giving: bool) -> None:
        at, place = 0, piece.place
        for part in parts:
            data = self._backend.raw(part)
            first, last = max(piece.start - at, 0), min(piece.start + piece.num_bytes - at, len(data))
            if first < last:
                ours, shared = data[first:last], self._shared[place : place + last - first]
                (shared if is_giving else ours)[:] = ours if is_giving else shared
                place += last - first
            at += len(data)
