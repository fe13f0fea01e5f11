"""The block ids of every slot, and the matrix of those that run, as the kernels read it. `batch.py` owns one.

The matrix of the last step stays for as long as the same slots run: a new block is one more number in it. It has some
columns to spare, so that growing sequences do not ask for a new one in every step.
"""

from __future__ import annotations

import numpy as np

_SPARE_BLOCKS = 8


class BlockTables:
    """Changed by `write` alone."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self._all = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._slots: list[int] = []
        self._row_of: dict[int, int] = {}
        self._rows = self._all[:0]

    @property
    def max_blocks(self) -> int:
        return self._all.shape[1]

    def write(self, slot: int, first: int, block_ids: list[int]) -> None:
        """`block_ids` are those of a slot from number `first` on."""
        row = self._row_of.get(slot)
        for column, block_id in enumerate(block_ids, first):
            self._all[slot, column] = block_id
            if row is not None and column < self._rows.shape[1]:
                self._rows[row, column] = block_id

    def rows(self, slots: list[int], width: int) -> np.ndarray:
        """At least `width` block ids of each slot, int32 [slots, ...]; valid until the next call. What stands behind a
        slot's own blocks means nothing."""
        if slots != self._slots or width > self._rows.shape[1]:
            self._rows = self._all[slots, : width + _SPARE_BLOCKS]
            self._slots = slots
            self._row_of = {slot: row for row, slot in enumerate(slots)}
        return self._rows
