"""A tensor as it lies in a checkpoint file: name, shape, kind of storage and a read-only view of its bytes.

The readers (`gguf.py`, `safetensors.py`) make these, `models/` checks their shapes, and a backend packs them: the
reference one through `dequantize()`, a compiled one may repack `data` itself. Nothing is copied until somebody asks.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from headrace.errors import CheckpointError


class TensorKind(Enum):
    """How numbers are stored: (name, numbers per block, bytes per block). Layouts of the Q kinds are in `quants.py`."""

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)
    Q5_0 = ("Q5_0", 32, 22)
    Q5_1 = ("Q5_1", 32, 24)
    Q8_0 = ("Q8_0", 32, 34)
    Q4_K = ("Q4_K", 256, 144)
    Q5_K = ("Q5_K", 256, 176)
    Q6_K = ("Q6_K", 256, 210)

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def block_size(self) -> int:
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        return self.value[2]

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of `num_elements` numbers, which must fill whole blocks."""
        assert num_elements % self.block_size == 0, (self.label, num_elements)
        return num_elements // self.block_size * self.block_bytes


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor; `shape` is row-major with the fastest axis last, and blocks run along that axis."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    data: np.ndarray  # uint8 [bytes], read-only, usually a view of the mapped file

    @classmethod
    def from_floats(cls, name: str, values: np.ndarray) -> CheckpointTensor:
        """Float32 numbers as a tensor; the array must not change any more."""
        values = np.ascontiguousarray(values, np.float32)
        return cls(name, values.shape, TensorKind.F32, values.reshape(-1).view(np.uint8))

    def is_finite(self) -> bool:
        """Whether all numbers are; of block kinds, whether all scales are, since nothing else in them can fail."""
        from headrace.weights.quants import has_only_finite

        return has_only_finite(self.data, self.kind)

    def fitted(self, shape: tuple[int, ...]) -> CheckpointTensor | None:
        """The same numbers in `shape`, None if they have another; leading axes of length 1 make no difference."""
        if self.shape == shape:
            return self
        is_like = _without_ones(self.shape) == _without_ones(shape)
        return CheckpointTensor(self.name, shape, self.kind, self.data) if is_like else None

    def rows(self, rows: range) -> CheckpointTensor:
        """Some of the rows, as a view; of a vector, some of its numbers."""
        num_bytes = self.kind.num_bytes(math.prod(self.shape[1:]))
        part = self.data[rows.start * num_bytes : rows.stop * num_bytes]
        return CheckpointTensor(self.name, (len(rows), *self.shape[1:]), self.kind, part)

    def dequantize(self) -> np.ndarray:
        """The numbers as a new float32 array of `shape`."""
        from headrace.weights.quants import dequantize  # imports this module for the kinds

        return dequantize(self.data, self.kind).reshape(self.shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes of length 1 dropped."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def map_file(path: Path) -> mmap.mmap:
    """The file as read-only memory; it stays mapped as long as a view of it lives."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
