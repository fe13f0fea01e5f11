"""Packs one set of weights for the compiled kernels, in memory of its own: it goes when the last of its weights does.

`NativeBackend.packer` makes one per load or refresh. It may work in another thread than the one that runs steps.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from headrace.kernels.native import _native
from headrace.kernels.native.steps import StackedWeight
from headrace.kernels.ops import Formats

FLOAT_KINDS = frozenset({"F32", "F16", "BF16"})
AS_THEY_ARE = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q8_0", "F16", "BF16"})
"""Kinds whose bytes the packer reads. The others are dequantised and rounded to 8 bits, finer than they are."""


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


class NativePacker:
    """Implements `Packer`. `quantization` rounds float matrices to w8 or w4, where nothing else is said."""

    def __init__(self, quantization: str | None) -> None:
        self._quantization = quantization
        self._arena = _native.Arena()

    def pack_linear(self, parts: list[Any], bias: list[Any] | None = None, formats: Formats = ()) -> StackedWeight:
        kinds = formats or (None,) * len(parts)
        biases = tuple(self.pack_vector(part) for part in bias) if bias else (None,) * len(parts)
        return StackedWeight(tuple(map(self._pack, parts, kinds)), biases)

    def pack_table(self, tensor: Any, formats: Formats = ()) -> StackedWeight:
        return self.pack_linear([tensor], formats=formats)

    def pack_vector(self, tensor: Any) -> np.ndarray:
        values = tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
        return np.ascontiguousarray(values, np.float32)

    def _pack(self, tensor: StoredTensor | _native.Weight, kind: str | None) -> _native.Weight:
        """`kind` is the one that floats are rounded to, as those that they replace were."""
        if isinstance(tensor, _native.Weight):
            return tensor
        rows, cols = tensor.shape
        stored_as = tensor.kind.label
        is_float = stored_as in FLOAT_KINDS
        kind = (kind or self._quantization) if is_float else None
        if kind in ("w4", "w8"):
            return _native.pack_floats(self._arena, kind, tensor.dequantize())
        if kind is not None and kind != stored_as.lower():
            return self._pack_floats_as(kind, tensor.dequantize())
        if stored_as in AS_THEY_ARE:
            return _native.pack_blocks(self._arena, stored_as, tensor.data, rows, cols)
        return _native.pack_floats(self._arena, "f32" if is_float else "w8", tensor.dequantize())

    def _pack_floats_as(self, kind: str, values: np.ndarray) -> _native.Weight:
        rows, cols = values.shape
        if kind == "f32":
            return _native.pack_floats(self._arena, "f32", values)
        halves = values.astype(np.float16) if kind == "f16" else to_bfloat16(values)
        return _native.pack_blocks(self._arena, kind.upper(), halves.view(np.uint8).reshape(-1), rows, cols)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, rounded to nearest even, as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
