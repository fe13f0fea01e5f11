"""The numpy backend: packs weights as float32 and runs a model's ops one by one.

Made by `create_backend`. The same code serves both kinds of arithmetic.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.kernels.ops import KVSpec, Model, StepInputs
from headrace.kernels.reference.arithmetic import Arithmetic, Floats, Matrix
from headrace.kernels.reference.memory import PagedKV, RopeTables
from headrace.kernels.reference.ops import ReferenceOps


class StoredTensor(Protocol):
    """What is packed: a checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self) -> Floats: ...


class ReferenceBackend:
    """Implements `Backend`."""

    def __init__(self, name: str, arithmetic: Arithmetic) -> None:
        self.name = name
        self._arithmetic = arithmetic
        self._ropes = RopeTables()
        self._kv: PagedKV | None = None

    def pack_linear(self, parts: list[StoredTensor], bias: list[StoredTensor] | None = None) -> Matrix:
        return Matrix(self._arithmetic.lay_out(_stack(parts)), None if bias is None else _stack(bias))

    def pack_table(self, tensor: StoredTensor) -> Matrix:
        return self.pack_linear([tensor])

    def pack_vector(self, tensor: StoredTensor) -> Floats:
        return tensor.dequantize()

    def kv_bytes_per_token(self, spec: KVSpec) -> int:
        return spec.num_vectors_per_token() * spec.head_dim * 4

    def allocate_kv(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self._kv = PagedKV(spec, num_blocks, block_size)

    def run(self, model: Model, inputs: StepInputs) -> Floats:
        assert self._kv is not None, "allocate_kv comes first"
        with np.errstate(all="ignore"):  # a bad weight gives bad logits, which the runner reports
            logits: Floats = model.forward(ReferenceOps(self._arithmetic, self._kv, self._ropes, inputs))
        return logits

    def best_tokens(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return logits.argmax(axis=1), np.isfinite(logits).all(axis=1)


def _stack(parts: list[StoredTensor]) -> Floats:
    """All parts along their first axis, dequantised one at a time."""
    if len(parts) == 1:
        return parts[0].dequantize()
    out = np.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), np.float32)
    start = 0
    for part in parts:
        out[start : start + part.shape[0]] = part.dequantize()
        start += part.shape[0]
    return out
