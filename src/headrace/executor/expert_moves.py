"""Moves experts between the ranks of a model until a new map can take effect. Rank 0's side.

    open(map, rows) -> copy(max_bytes) beside the steps, until it says that nothing is left -> place()      or drop()

Weights go from a rank that has an expert to one that gets it, through memory that both see. Nothing that serves changes
before `place`, which changes weights and map together, on all ranks, between two steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from headrace.eplb.layout import ExpertMap
from headrace.eplb.moves import Move, fetches, moves
from headrace.executor.experts import NICENESS, ExpertShelf
from headrace.executor.weights import RankWeights
from headrace.executor.workers import Workers
from headrace.kernels.native import _native
from headrace.transport import worker as wire

_NO_STEP_S = 0.002  # without a step for so long there is none to wait for
Key = tuple[int, int]
"""Layer and expert."""


@dataclass(slots=True)
class _Transfer:
    """One expert on its way to all ranks that get it."""

    key: Key
    source: int
    targets: tuple[int, ...]
    shapes: list[wire.PartShape] = field(default_factory=list)
    num_done: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes)


class ExpertMoves:
    """One map at a time. Belongs to the engine's thread, between steps.

    Copying has a thread of its own: it would hold up the steps, not least because new memory is slow when it is first
    written. It begins when a step does, because until then it would compete with the engine for the interpreter.
    """

    def __init__(self, weights: RankWeights, shelf: ExpertShelf, workers: Workers, group: _native.Group) -> None:
        self._weights = weights
        self._shelf = shelf
        self._workers = workers
        self._group = group
        self._thread = ThreadPoolExecutor(1, "expert-moves", os.nice, (NICENESS,))
        self._thread.submit(int)  # starts it
        self._lock = threading.Lock()  # whoever ends a map waits for a copy that is under way
        self._map: ExpertMap | None = None
        self._rows: list[int] = []  # of the map that is open, which shall come into force
        self._left: list[_Transfer] = []  # of the layer whose turn it is
        self._layers_left: list[int] = []  # the rows that were not begun
        self._shapes: dict[Key, list[wire.PartShape]] = {}  # of those that have moved, of the weights in use
        self.num_bytes = 0  # that have been moved for this map
        self.num_experts = 0

    @property
    def current(self) -> ExpertMap:
        experts = self._weights.shard.experts
        assert experts is not None, "made where experts are spread over ranks"
        return experts

    @property
    def bytes_per_expert(self) -> int:
        layer, slots_P = next(iter(self._weights.shard.moe_index)), self.current.slots_LP[0]
        return sum(shape.num_bytes for shape in self._shelf.describe(layer, int(slots_P[0])))  # slot 0 is rank 0's

    def open(self, new: ExpertMap, rows: Sequence[int]) -> None:
        """Gets ready for rows of a map. What was open is dropped."""
        self.drop()
        self._map, self._rows, self._layers_left = new, list(rows), list(rows)

    def copy(self, max_bytes: int) -> Future[bool]:
        """Moves at most about so many bytes, beside the steps; its result says whether any are left. When none are, all
        is ready to be placed."""
        assert self._map is not None, "open comes first"
        max_bytes = min(max_bytes, _native.Group.moves_bytes)
        return self._thread.submit(self._copy, self._group.posted, self._map, max_bytes)

    def _copy(self, seen: int, new: ExpertMap, max_bytes: int) -> bool:
        """Nothing happens when the map is no longer wanted."""
        self._group.wait(seen, _NO_STEP_S)
        with self._lock:
            if self._map is not new:
                return False
            pieces: list[tuple[_Transfer, wire.ExpertPiece]] = []
            place = 0
            while place < max_bytes and self._has_more(new):
                transfer = self._left[0]
                count = min(transfer.num_bytes - transfer.num_done, max_bytes - place)
                pieces.append((transfer, wire.ExpertPiece(*transfer.key, transfer.num_done, count, place)))
                transfer.num_done += count
                place += -(-count // 64) * 64
                if transfer.num_done == transfer.num_bytes:
                    self._left.pop(0)
                    self.num_experts += len(transfer.targets)
            if pieces:
                self._move(pieces)
                self.num_bytes += sum(piece.num_bytes * len(transfer.targets) for transfer, piece in pieces)
            if self._has_more(new):
                return True
            rows = {index: new.slots_LP[index].tolist() for index in self._rows}
            self._call_all(wire.PrepareExperts(rows), lambda: self._shelf.prepare(rows))
            return False

    def _has_more(self, new: ExpertMap) -> bool:
        """A layer's moves are found when their turn has come: all at once would take long."""
        while not self._left and self._layers_left:
            self._left = self._described(self._transfers(new, self._layers_left.pop(0)))
        return bool(self._left)

    def place(self) -> None:
        """The next step runs with the new map."""
        assert self._map is not None, "open and copy come first"
        assert not self._left, "copy to the end comes first"
        assert not self._layers_left, "copy to the end comes first"
        self._workers.call(wire.PlaceExperts(), "between", meanwhile=self._shelf.place)
        self._clear()
        self._thread.submit(self._tidy, self._group.posted)

    def forget_shapes(self) -> None:
        """Other weights may be packed in another way."""
        self._shapes.clear()

    def drop(self) -> None:
        """Forgets a map that was open, and what was moved for it. Idempotent."""
        with self._lock:
            if self._map is not None:
                self._call_all(wire.DropExperts(), self._shelf.drop)
            self._clear()

    def _tidy(self, seen: int) -> None:
        """Gives back what is no longer held, before anything else is copied."""
        self._group.wait(seen, _NO_STEP_S)
        with self._lock:
            self._call_all(wire.DropExperts(), self._shelf.drop)

    def remap(self, new: ExpertMap) -> None:
        """While there are no weights: the next ones are read, or taken from whoever sends them, straight to where this
        map wants them."""
        self.drop()
        formats = self._weights.expert_formats()
        for reply in self._workers.call(wire.ReadFormats(), "between"):
            assert isinstance(reply, wire.ExpertFormats), "that is the answer"
            formats.update(reply.formats)
        slots = new.slots_LP.tolist()
        call = wire.RemapExperts(slots, formats)
        self._workers.call(call, "between", meanwhile=lambda: self._weights.remap(slots, formats))
        self._shapes.clear()

    def close(self) -> None:
        """After the workers."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _clear(self) -> None:
        self._map, self._rows, self._left, self._layers_left = None, [], [], []
        self.num_bytes = self.num_experts = 0

    def _transfers(self, new: ExpertMap, row: int) -> list[_Transfer]:
        """One per expert that some rank lacks; to however many ranks, it is read once."""
        layer = list(self._weights.shard.moe_index)[row]
        old, target = (
            ExpertMap(each.slots_LP[[row]], each.num_experts, each.num_ranks) for each in (self.current, new)
        )
        wanted: dict[Key, list[Move]] = {}
        for move in fetches(moves(old, target)):
            wanted.setdefault((layer, move.expert), []).append(move)
        return [
            _Transfer(key, group[0].source_rank, tuple(sorted({move.target_rank for move in group})))
            for key, group in wanted.items()
        ]

    def _described(self, transfers: list[_Transfer]) -> list[_Transfer]:
        size = self._weights.shard.size
        new = [each for each in transfers if each.key not in self._shapes]
        by_source = [[each for each in new if each.source == rank] for rank in range(size)]
        for transfer in by_source[0]:
            self._shapes[transfer.key] = self._shelf.describe(*transfer.key)
        if any(by_source[1:]):
            calls = [wire.DescribeExperts([each.key for each in by_source[rank]]) for rank in range(1, size)]
            for own, reply in zip(by_source[1:], self._workers.call_each(calls, "behind", may_fail=True), strict=True):
                assert isinstance(reply, wire.Shapes), "that is the answer"
                self._shapes.update(zip((transfer.key for transfer in own), reply.shapes, strict=True))
        for transfer in transfers:
            transfer.shapes = self._shapes[transfer.key]
        return transfers

    def _move(self, pieces: list[tuple[_Transfer, wire.ExpertPiece]]) -> None:
        ranks = range(self._weights.shard.size)
        given = [[piece for transfer, piece in pieces if transfer.source == rank] for rank in ranks]
        taken = [[piece for transfer, piece in pieces if rank in transfer.targets] for rank in ranks]
        shapes = {"{}.{}".format(*transfer.key): transfer.shapes for transfer, _ in pieces}
        self._call_each([wire.GiveExperts(given[rank]) for rank in ranks[1:]], lambda: self._shelf.give(given[0]))
        self._call_each(
            [wire.TakeExperts(taken[rank], shapes) for rank in ranks[1:]], lambda: self._shelf.take(taken[0], shapes)
        )

    def _call_all(self, call: wire.Call, own: Callable[[], None]) -> None:
        self._call_each([call] * (self._weights.shard.size - 1), own)

    def _call_each(self, calls: Sequence[wire.Call], own: Callable[[], None]) -> None:
        """On all ranks. It may fail: what was taken is nobody's yet."""
        self._workers.call_each(calls, "behind", meanwhile=own, may_fail=True)
