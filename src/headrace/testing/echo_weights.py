"""Weights of the mock engine: named tensors that compute nothing, so that the control plane runs without a model."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import CheckpointError, InvalidRequest, NotFound
from headrace.executor.base import Stage
from headrace.grammar import GrammarError
from headrace.types import GrammarSpec
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.incoming import apply_sparse
from headrace.weights.tensor import CheckpointTensor


class EchoStage:
    """Takes any tensors. `Stage` of the mock engine."""

    def __init__(self, base: Mapping[str, np.ndarray]) -> None:
        self._base = base
        self.tensors: dict[str, np.ndarray] = {}
        self.num_bytes = 0
        self.pack_s = 0.0

    @property
    def num_tensors(self) -> int:
        return len(self.tensors)

    def add_path(self, path: Path) -> None:
        try:
            self.add(open_checkpoint(path).tensors)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="source") from error

    def check_path(self, path: Path) -> None:
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="source") from error

    def check(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        for name, tensor in tensors.items():
            if not tensor.is_finite():
                raise InvalidRequest(f"Tensor {name[:80]!r} holds NaN or infinity.", param="source")

    def add(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        for name, tensor in tensors.items():
            if name in self.tensors:
                raise InvalidRequest(f"Tensor {name[:80]!r} came twice.", param="source")
            if not tensor.is_finite():
                raise InvalidRequest(f"Tensor {name[:80]!r} holds NaN or infinity.", param="source")
        for name, tensor in tensors.items():
            self.tensors[name] = tensor.dequantize()
            self.num_bytes += tensor.data.nbytes

    def add_sparse(self, name: str, indices: np.ndarray, values: np.ndarray, checksum: str | None = None) -> None:
        if name not in self._base:
            raise InvalidRequest(f"Tensor {name[:80]!r} is unknown.", param="source")
        self.tensors[name] = apply_sparse(self._base[name], indices, values, name=name)

    def missing(self) -> list[str]:
        return []


class EchoWeights:
    """The part of `Executor` that is about weights and memory."""

    expert_map = expert_moves = None
    expert_layers: tuple[int, ...] = ()

    def take_expert_counts(self) -> None:
        """There are no experts."""

    def check(self) -> None:
        """There is one rank."""

    def __init__(self) -> None:
        self._weights: dict[str, np.ndarray] | None = {}
        self.has_kv = True

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        """What has no logits follows no grammar."""
        future: Future[Any] = Future()
        future.set_exception(GrammarError("the mock engine follows none"))
        return future

    @property
    def weights_bytes(self) -> int:
        return sum(values.nbytes for values in (self._weights or {}).values())

    def open_stage(self, *, is_delta: bool) -> EchoStage:
        return EchoStage(self._weights if is_delta and self._weights is not None else {})

    def finish(self, stage: Stage) -> None:
        if not stage.num_tensors:
            raise InvalidRequest("The refresh has no tensors.", param="source")

    def swap(self, stage: Stage) -> None:
        assert isinstance(stage, EchoStage), "of open_stage"
        self._weights = {**(self._weights or {}), **stage.tensors}

    def close_stage(self, stage: Stage) -> None:
        """It goes with the object."""

    def drop_weights(self) -> None:
        self._weights = None

    def weight_names(self) -> list[str]:
        return list(self._weights or {})

    def read_weight(self, name: str) -> np.ndarray:
        if name not in (self._weights or {}):
            raise NotFound(f"There is no tensor {name[:80]!r}.", param="name")
        assert self._weights is not None, "it has the name"
        return self._weights[name]

    def differing(self, stage: Stage) -> list[str]:
        assert isinstance(stage, EchoStage), "of open_stage"
        ours = self._weights or {}
        names = sorted({*ours, *stage.tensors})
        return [name for name in names if not _equal(ours.get(name), stage.tensors.get(name))]

    def free_kv(self) -> None:
        self.has_kv = False

    def restore_kv(self) -> None:
        self.has_kv = True

    def check_can_step(self) -> None:
        assert self._weights is not None, "a step without weights"
        assert self.has_kv, "a step without KV memory"


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other, equal_nan=True)
