"""The part of the numpy backend in which numbers are added up or passed through a transcendental function.

`ReferenceOps` is written once against this protocol. `BlasArithmetic` is fast; `OrderedArithmetic` gives every result
one order of operations, whatever else is in the batch. All else that the ops do is one correctly rounded IEEE
operation per element, which has one result anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.kernels.ops import AttentionSpec

Floats = npt.NDArray[np.float32]
Function = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed weight: in the layout that its arithmetic wants, with its bias."""

    data: Floats
    bias_O: Floats | None = None
    sizes: tuple[int, ...] = ()  # outputs of each stacked part


class Arithmetic(Protocol):
    """T tokens, I inputs, O outputs, N visible context tokens, H query heads, G KV heads, K head size."""

    def lay_out(self, weight_OI: Floats) -> Floats:
        """The array that `linear` and `rows` read; may be the argument itself."""
        ...

    def rows(self, data: Floats, ids_T: np.ndarray) -> Floats:
        """Rows of the laid-out matrix: [T, I]."""
        ...

    def linear(self, x_TI: Floats, data: Floats) -> Floats:
        """[T, O], without bias."""
        ...

    def sum_squares(self, x: Floats) -> Floats:
        """Over the last axis, which stays with length 1."""
        ...

    def apply(self, function: Function, x_TI: Floats) -> Floats:
        """An elementwise function; a new array."""
        ...

    def attend(self, q_THK: Floats, k_NGK: Floats, v_NGK: Floats, offset: int, spec: AttentionSpec) -> Floats:
        """Causal attention of one sequence: query i sees keys up to offset + i, within the window: [T, H * K]."""
        ...


def first_visible(last: int, window: int | None) -> int:
    """Index of the first key that the query at index `last` sees."""
    return 0 if window is None else max(0, last - window + 1)
