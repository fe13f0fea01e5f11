"""What a recorded op is: values, weights, and how an op is appended once its values have buffers.

Made by `recorder.py`, fused here, appended to a program by `emitter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from headrace.kernels.native.emitter import Emitter

View = tuple[int, int, int]
"""Buffer, first column, number of columns."""


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Checkpoint tensors stacked along their outputs, each packed on its own, so their kinds may differ."""

    parts: tuple[Any, ...]  # _native.Weight
    biases: tuple[np.ndarray | None, ...]

    @property
    def num_outputs(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def is_quantized(self) -> bool:
        return any(part.is_quantized for part in self.parts)


@dataclass(frozen=True, slots=True)
class Symbol:
    """Columns [offset, offset + width) of a value, seen as `heads` heads."""

    value: int
    offset: int
    width: int
    heads: int = 1


@dataclass(slots=True)
class Step:
    """One recorded op: which values it reads, which one it makes, and how to append it once these have buffers."""

    kind: str
    inputs: tuple[Symbol, ...]
    output: Symbol
    emit: Callable[[Emitter, list[View], View], None] | None
    weight: StackedWeight | None = None
    residual: Symbol | None = None
    sizes: tuple[int, ...] | None = None  # columns of each rank, where ranks exchange what they have


def fuse_residuals(steps: list[Step]) -> list[Step]:
    """x + linear(y) becomes one command, where that is all that is done with the linear layer's result."""
    readers: dict[int, int] = {}
    for step in steps:
        for symbol in step.inputs:
            readers[symbol.value] = readers.get(symbol.value, 0) + 1
    fused: list[Step] = []
    for step in steps:
        last = fused[-1] if fused else None
        if (
            step.kind == "add"
            and last is not None
            and last.kind == "linear"
            and last.residual is None
            and step.inputs[1].value == last.output.value
            and step.inputs[1].width == last.output.width
            and readers[last.output.value] == 1
        ):
            fused[-1] = replace(
                last, inputs=(*last.inputs, step.inputs[0]), residual=step.inputs[0], output=step.output
            )
        else:
            fused.append(step)
    return fused
