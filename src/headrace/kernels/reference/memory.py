"""Paged KV memory and rotary tables of the numpy backend."""

from __future__ import annotations

import numpy as np

from headrace.kernels.ops import KVSpec, RopeSpec
from headrace.kernels.reference.arithmetic import Floats

ROPE_BLOCK = 1024


class PagedKV:
    """K and V of all layers, [layers, blocks * block size, G, K]. Pages are zero and take no memory until written."""

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        shape = (spec.num_layers, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        self.block_size = block_size
        self.k = np.zeros(shape, np.float32)
        self.v = np.zeros(shape, np.float32)

    def store(self, layer: int, slots_T: np.ndarray, k_TGK: Floats, v_TGK: Floats) -> None:
        self.k[layer, slots_T] = k_TGK
        self.v[layer, slots_T] = v_TGK

    def places(self, table_B: np.ndarray, start: int, end: int) -> slice | np.ndarray:
        """Where tokens `start` to `end` of a sequence lie: a slice when its blocks are neighbours, else slots."""
        size = self.block_size
        first_block = start // size
        blocks = table_B[first_block : (end + size - 1) // size].astype(np.int64)
        begin, count = start - first_block * size, end - start
        if blocks.size and np.array_equal(blocks, np.arange(blocks[0], blocks[0] + blocks.size)):
            at = int(blocks[0]) * size + begin
            return slice(at, at + count)
        slots = blocks[:, None] * size + np.arange(size)
        return slots.reshape(-1)[begin : begin + count]


class RopeTables:
    """cos and sin by position, grown in blocks of fixed size: a position's row never depends on who asks for it."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[RopeSpec, Floats, Floats]] = {}

    def rows(self, spec: RopeSpec, positions_T: np.ndarray) -> tuple[Floats, Floats]:
        """cos and sin, each [T, 1, half of the rotated part]."""
        entry = self._tables.get(id(spec))  # the entry keeps the spec alive, so its id stays its own
        needed = int(positions_T.max(initial=0)) + 1
        if entry is None or entry[1].shape[0] < needed:
            entry = self._grow(spec, needed)
            self._tables[id(spec)] = entry
        return entry[1][positions_T][:, None, :], entry[2][positions_T][:, None, :]

    def _grow(self, spec: RopeSpec, needed: int) -> tuple[RopeSpec, Floats, Floats]:
        starts = range(0, needed, ROPE_BLOCK)
        angles = [np.arange(s, s + ROPE_BLOCK, dtype=np.float32)[:, None] * spec.inv_freq for s in starts]
        scale = np.float32(spec.attention_scale)
        cos = np.concatenate([np.cos(a.astype(np.float64)).astype(np.float32) for a in angles]) * scale
        sin = np.concatenate([np.sin(a.astype(np.float64)).astype(np.float32) for a in angles]) * scale
        return spec, cos, sin
