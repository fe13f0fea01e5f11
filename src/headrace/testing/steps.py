"""Runs sequences through a backend without an engine: builds `StepInputs` and keeps block tables in random order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.kernels import Backend
from headrace.kernels.ops import StepInputs
from headrace.models import LoadedModel

BLOCK_SIZE = 4


class Runner:
    """Sequences by number, each with its own shuffled blocks; every step returns the logits of all rows."""

    def __init__(
        self,
        model: LoadedModel,
        backend: Backend,
        *,
        num_blocks: int = 256,
        seed: int = 0,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.model = model
        self.backend = backend
        self.block_size = block_size
        backend.allocate_kv(model.kv_spec, num_blocks, block_size)
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Computes the given tokens of each sequence; returns logits [tokens, V] by sequence."""
        logits = self.backend.run(self.model.decoder, self._inputs(chunks)).logits_RV.copy()
        assert logits.dtype == np.float32
        rows = np.split(logits, np.cumsum([len(chunk) for chunk in chunks.values()])[:-1])
        return dict(zip(chunks, rows, strict=True))

    def release(self, name: int) -> None:
        """Forgets a sequence; its blocks, with what is in them, are the next to be given away."""
        self.free += self.tables.pop(name)
        del self.lengths[name]

    def _inputs(self, chunks: dict[int, Sequence[int]]) -> StepInputs:
        positions: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        for name, chunk in chunks.items():
            start = self.lengths.get(name, 0)
            end = self.lengths[name] = start + len(chunk)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            positions += range(start, end)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]
            context_lens.append(end)
        width = max(len(self.tables[name]) for name in chunks)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in chunks]
        counts = [len(chunk) for chunk in chunks.values()]
        return StepInputs(
            token_ids_T=np.array([t for chunk in chunks.values() for t in chunk], np.int32),
            positions_T=np.array(positions, np.int32),
            kv_slots_T=np.array(slots, np.int64),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens_S=np.array(context_lens, np.int32),
            block_tables_SB=np.array(tables, np.int32),
            logit_rows_R=np.arange(sum(counts), dtype=np.int32),
        )
