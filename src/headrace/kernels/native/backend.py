"""The compiled CPU backend: packs weights, owns KV memory and threads, records a model once and replays it.

Created by `kernels.create_backend("native")`. Rows of a step never influence each other's bits: every sum in csrc/ has
one order that depends on the row alone.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from headrace.errors import ConfigError
from headrace.kernels.native import _native
from headrace.kernels.native.recorder import StackedWeight, record
from headrace.kernels.ops import KVSpec, Model, StepInputs

FLOAT_KINDS = frozenset({"F32", "F16", "BF16"})
AS_THEY_ARE = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16", "BF16"})
"""Kinds whose bytes the packer reads. The others are dequantised and rounded to 8 bits, finer than they are."""
KEPT_LOGIT_ROWS = 128


def usable_cores() -> int:
    """Cores that this process may run on, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StorageKind(Protocol):
    @property
    def label(self) -> str: ...


class StoredTensor(Protocol):
    """What is packed: a checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> StorageKind: ...

    @property
    def data(self) -> np.ndarray: ...

    def dequantize(self) -> np.ndarray: ...


class NativeBackend:
    """`Backend` over the C++ kernels. `num_threads` None: one per core that this process may use."""

    name = "native"

    def __init__(
        self, num_threads: int | None = None, quantization: str | None = None, has_int8_kv: bool = False
    ) -> None:
        self._has_int8_kv = has_int8_kv
        self.num_threads = num_threads or usable_cores()
        self._quantization = quantization
        self._arena = _native.Arena()
        self._pool = _native.Pool(self.num_threads, False)
        self._kv: Any = None
        self._program: Any = None
        self._model: Model | None = None
        self._logits = np.empty((0, 0), np.float32)

    def pack_linear(self, parts: list[StoredTensor], bias: list[StoredTensor] | None = None) -> StackedWeight:
        biases = tuple(self.pack_vector(part) for part in bias) if bias else (None,) * len(parts)
        return StackedWeight(tuple(self._pack(part) for part in parts), biases)

    def pack_table(self, tensor: StoredTensor) -> StackedWeight:
        return StackedWeight((self._pack(tensor),), (None,))

    def pack_vector(self, tensor: StoredTensor) -> np.ndarray:
        return np.ascontiguousarray(tensor.dequantize(), np.float32)

    def _pack(self, tensor: StoredTensor) -> Any:
        rows, cols = tensor.shape
        kind = tensor.kind.label
        is_float = kind in FLOAT_KINDS
        if is_float and self._quantization is not None:
            return _native.pack_floats(self._arena, self._quantization, tensor.dequantize())
        if kind in AS_THEY_ARE:
            return _native.pack_blocks(self._arena, kind, tensor.data, rows, cols)
        return _native.pack_floats(self._arena, "f32" if is_float else "w8", tensor.dequantize())

    def kv_bytes_per_token(self, spec: KVSpec) -> int:
        padded_dim = -(-spec.head_dim // 16) * 16
        return spec.num_vectors_per_token() * (padded_dim + 4 if self._has_int8_kv else 2 * padded_dim)

    def allocate_kv(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        if block_size % 16:
            raise ConfigError(f"--block-size {block_size} is not possible with native kernels: give a multiple of 16")
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim, num_blocks, block_size)
        self._kv = _native.KVMemory(*shape, self._has_int8_kv)
        self._program = None

    def run(self, model: Model, inputs: StepInputs) -> np.ndarray:
        if self._program is None or self._model is not model:
            self._program = self._record(model)
            self._model = model
        logits = self._logits_of(len(inputs.logit_rows_R))
        self._program.run(
            inputs.token_ids_T,
            inputs.positions_T,
            inputs.kv_slots_T,
            inputs.query_starts,
            inputs.context_lens_S,
            inputs.block_tables_SB,
            inputs.logit_rows_R,
            logits,
        )
        return logits

    def best_tokens(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
        _native.best_tokens(self._pool, logits, ids, finite)
        return ids, finite

    def _logits_of(self, num_rows: int) -> np.ndarray:
        """Room for a step's logits, valid until the next one: fresh memory would cost a page fault per 4 KB."""
        if num_rows > KEPT_LOGIT_ROWS:
            return np.empty((num_rows, self._vocab_size), np.float32)
        if self._logits.shape != (KEPT_LOGIT_ROWS, self._vocab_size):
            self._logits = np.empty((KEPT_LOGIT_ROWS, self._vocab_size), np.float32)
        return self._logits[:num_rows]

    def _record(self, model: Model) -> Any:
        assert self._kv is not None, "allocate_kv comes before the first step"
        program = _native.Program(self._pool)
        self._vocab_size = record(model, program)
        program.use_kv(self._kv)
        return program
