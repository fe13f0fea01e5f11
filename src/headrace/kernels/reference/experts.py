"""One layer's experts in the numpy backend: which slot holds which, what each computes, and how many tokens it got."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from headrace.kernels.reference.arithmetic import Matrix


class ReferenceExperts:
    """Implements `Experts`."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._replicas_ER = np.zeros((num_experts, 1), np.int64)  # slots of each expert, R the most that one has
        self._num_replicas_E = np.zeros(num_experts, np.int64)
        self._lock = threading.Lock()
        self._counts_P = np.zeros(0, np.int64)
        self.held: Mapping[int, tuple[Matrix, Matrix]] = {}

    def place(self, slots_P: np.ndarray, held: Mapping[int, tuple[Matrix, Matrix]]) -> None:
        """Counts begin anew: a slot may mean another expert now."""
        counts_E = np.bincount(slots_P, minlength=self._num_experts)
        assert len(counts_E) == self._num_experts, "slots hold experts that there are"
        assert counts_E.min() > 0, "every expert has a slot"
        replicas_ER = np.zeros((self._num_experts, counts_E.max()), np.int64)
        filled_E = np.zeros(self._num_experts, np.int64)
        for slot, expert in enumerate(slots_P.tolist()):
            replicas_ER[expert, filled_E[expert]] = slot
            filled_E[expert] += 1
        self._replicas_ER, self._num_replicas_E = replicas_ER, counts_E
        self.held = dict(held)
        with self._lock:
            self._counts_P = np.zeros(len(slots_P), np.int64)

    def slots(self, chosen_TC: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
        """The slot that each token's chosen experts are computed in, int64 [T, C]; counts them."""
        replica_TC = positions_T[:, None] % self._num_replicas_E[chosen_TC]
        slots_TC: np.ndarray = self._replicas_ER[chosen_TC, replica_TC]
        with self._lock:
            self._counts_P += np.bincount(slots_TC.reshape(-1), minlength=len(self._counts_P))
        return slots_TC

    def take_counts(self) -> np.ndarray:
        with self._lock:
            taken, self._counts_P = self._counts_P, np.zeros_like(self._counts_P)
        return taken
