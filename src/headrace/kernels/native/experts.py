"""One layer's experts in the compiled backend, and how an op over them is appended to a program.

Made by `NativeBackend.experts`, recorded by `recorder.py`. csrc/experts.h says how they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.kernels.native import _native
from headrace.kernels.native.steps import StackedWeight
from headrace.kernels.ops import RoutingSpec


class NativeExperts:
    """Implements `Experts`. Replicas are chosen in the order of their slots; counts begin anew with each placement."""

    def __init__(self, num_experts: int) -> None:
        self.table = _native.Experts(num_experts)
        self._num_slots = 0

    def place(self, slots_P: np.ndarray, held: Mapping[int, tuple[StackedWeight, StackedWeight]]) -> None:
        """ValueError where an expert has no slot, or the shapes of experts differ; then everything is as before."""
        assert not any(bias is not None for pair in held.values() for weight in pair for bias in weight.biases), (
            "experts have no biases"
        )
        parts = [(slot, list(gate_up.parts), list(down.parts)) for slot, (gate_up, down) in held.items()]
        self.table.place(np.ascontiguousarray(slots_P, np.int32), parts)
        self._num_slots = len(slots_P)

    def take_counts(self) -> np.ndarray:
        counts_P = np.empty(self._num_slots, np.int64)
        self.table.take_counts(counts_P)
        return counts_P


def native_routing(spec: RoutingSpec) -> _native.Routing:
    return _native.Routing(
        num_experts=spec.num_experts,
        num_per_token=spec.num_per_token,
        is_sigmoid=spec.scoring == "sigmoid",
        is_normalised=spec.is_normalised,
        norm_floor=spec.norm_floor,
        scale=spec.scale,
        groups=(spec.num_groups, spec.num_groups_used, spec.num_per_group_score),
    )
