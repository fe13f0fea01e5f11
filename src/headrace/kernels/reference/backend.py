"""The numpy backend: packs weights as float32 and runs a model's ops one by one.

Made by `create_backend`. The same code serves both kinds of arithmetic.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.kernels.ops import Formats, KVSpec, Model, StepInputs, StepOutputs
from headrace.kernels.reference.arithmetic import Arithmetic, Floats, Matrix
from headrace.kernels.reference.experts import ReferenceExperts
from headrace.kernels.reference.memory import PagedKV, RopeTables
from headrace.kernels.reference.ops import ReferenceOps


class StoredTensor(Protocol):
    """What is packed: a checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self) -> Floats: ...


class ReferenceBackend:
    """Implements `Backend`."""

    draw = None

    def __init__(self, name: str, arithmetic: Arithmetic) -> None:
        self.name = name
        self._arithmetic = arithmetic
        self._ropes = RopeTables()
        self._kv: PagedKV | None = None

    def packer(self) -> ReferencePacker:
        return ReferencePacker(self._arithmetic)

    def experts(self, num_experts: int) -> ReferenceExperts:
        return ReferenceExperts(num_experts)

    def formats(self, packed: Matrix | Floats) -> Formats:
        return ()

    def parts(self, packed: Matrix | Floats) -> tuple[list[Floats], list[Floats] | None]:
        if isinstance(packed, np.ndarray):
            return [packed], None
        borders = np.cumsum(packed.sizes)[:-1]
        rows = self._arithmetic.rows(packed.data, np.arange(sum(packed.sizes)))
        biases = None if packed.bias_O is None else np.split(packed.bias_O, borders)
        return np.split(rows, borders), biases

    def unpack(self, part: Floats) -> Floats:
        return part

    def raw(self, part: Floats) -> np.ndarray:
        return part.reshape(-1).view(np.uint8)

    def blank(self, kind: str, rows: int, cols: int) -> Floats:
        return np.zeros((rows, cols), np.float32)

    def prepare(self, model: Model) -> None:
        """Nothing is recorded here."""

    def forget(self) -> None:
        """Nothing is kept of a model here."""

    def free_kv(self) -> None:
        self._kv = None

    def kv_bytes_per_token(self, spec: KVSpec) -> int:
        return spec.num_vectors_per_token() * spec.head_dim * 4

    def allocate_kv(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        self._kv = PagedKV(spec, num_blocks, block_size)

    def run(self, model: Model, inputs: StepInputs) -> StepOutputs:
        assert self._kv is not None, "allocate_kv comes first"
        with np.errstate(all="ignore"):  # a bad weight gives bad logits, which the runner reports
            ops = ReferenceOps(self._arithmetic, self._kv, self._ropes, inputs)
            logits: Floats = model.forward(ops)
        return StepOutputs(logits, logits.argmax(axis=1), np.asarray(np.isfinite(logits).all(axis=1)), ops.hidden_UD)


class ReferencePacker:
    """Implements `Packer`: everything becomes float32."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    def pack_linear(
        self, parts: list[StoredTensor | Floats], bias: list[StoredTensor | Floats] | None = None, formats: Formats = ()
    ) -> Matrix:
        sizes = tuple(part.shape[0] for part in parts)
        return Matrix(self._arithmetic.lay_out(_stack(parts)), None if bias is None else _stack(bias), sizes)

    def pack_table(self, tensor: StoredTensor | Floats, formats: Formats = ()) -> Matrix:
        return self.pack_linear([tensor])

    def pack_vector(self, tensor: StoredTensor | Floats) -> Floats:
        return _floats(tensor)


def _floats(part: StoredTensor | Floats) -> Floats:
    return part if isinstance(part, np.ndarray) else part.dequantize()


def _stack(parts: list[StoredTensor | Floats]) -> Floats:
    """All parts along their first axis, dequantised one at a time."""
    if len(parts) == 1:
        return _floats(parts[0])
    out = np.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), np.float32)
    start = 0
    for part in parts:
        out[start : start + part.shape[0]] = _floats(part)
        start += part.shape[0]
    return out
