"""The compiled CPU backend: packs weights, owns KV memory and threads, records a model once and replays it.

Created by `kernels.create_backend("native")`. Rows of a step never influence each other's bits: every sum in csrc/ has
one order that depends on the row alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.kernels.native import _native
from headrace.kernels.native.experts import NativeExperts
from headrace.kernels.native.mailbox import arrays_of, post_inputs
from headrace.kernels.native.packer import NativePacker
from headrace.kernels.native.recorder import record
from headrace.kernels.native.steps import StackedWeight
from headrace.kernels.ops import Draw, Formats, KVSpec, Model, StepInputs, StepOutputs

KEPT_ROWS = 128
"""Rows of logits whose memory is kept from step to step: fresh memory would cost a page fault per 4 KB."""


def usable_cores() -> int:
    """Cores that this process may run on, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outputs_of(num_rows: int, width: int) -> StepOutputs:
    """Room for them."""
    logits = np.empty((num_rows, width), np.float32)
    return StepOutputs(logits, np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_))


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """A model's commands over one KV memory."""

    program: _native.Program
    vocab_size: int
    hidden_size: int
    kv: _native.KVMemory


class NativeBackend:
    """`Backend` over the C++ kernels. `num_threads` None: one per core that this process may use. In a `group` every
    rank runs the same steps: rank 0 hands its inputs to the others, and its outputs alone mean something."""

    name = "native"

    def __init__(
        self,
        num_threads: int | None = None,
        quantization: str | None = None,
        has_int8_kv: bool = False,
        group: _native.Group | None = None,
    ) -> None:
        self._group = group
        self._has_int8_kv = has_int8_kv
        self.num_threads = num_threads or usable_cores()
        self._quantization = quantization
        self._pool = _native.Pool(self.num_threads, False)
        self._kv: Any = None
        self._program: RecordedProgram | None = None
        self._model: Model | None = None
        self._prepared: tuple[Model, RecordedProgram] | None = None
        self._shared_bytes = 0  # of the group's logits that have been touched
        self._kept = outputs_of(0, 0)
        self._outputs = self._kept  # as many of its rows as the last step had

    def packer(self) -> NativePacker:
        return NativePacker(self._quantization)

    def experts(self, num_experts: int) -> NativeExperts:
        return NativeExperts(num_experts)

    def formats(self, packed: StackedWeight | np.ndarray) -> Formats:
        return () if isinstance(packed, np.ndarray) else tuple(part.kind for part in packed.parts)

    def parts(self, packed: StackedWeight | np.ndarray) -> tuple[list[Any], list[Any] | None]:
        if isinstance(packed, np.ndarray):
            return [packed], None
        biases = None if packed.biases[0] is None else list(packed.biases)
        return list(packed.parts), biases

    def unpack(self, part: Any) -> np.ndarray:
        if isinstance(part, np.ndarray):
            return part
        values = np.empty((part.rows, part.cols), np.float32)
        _native.unpack(part, values)
        return values

    def raw(self, part: Any) -> np.ndarray:
        data: np.ndarray = part.data
        return data

    def blank(self, kind: str, rows: int, cols: int) -> Any:
        return _native.blank(kind, rows, cols)

    def kv_bytes_per_token(self, spec: KVSpec) -> int:
        padded_dim = -(-spec.head_dim // 16) * 16
        return spec.num_vectors_per_token() * (padded_dim + 4 if self._has_int8_kv else 2 * padded_dim)

    def allocate_kv(self, spec: KVSpec, num_blocks: int, block_size: int) -> None:
        if block_size % 16:
            raise ConfigError(f"--block-size {block_size} is not possible with native kernels: give a multiple of 16")
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim, num_blocks, block_size)
        self._kv = _native.KVMemory(*shape, self._has_int8_kv)
        self._program = None

    def free_kv(self) -> None:
        self._kv = self._program = self._prepared = None

    def prepare(self, model: Model) -> None:
        if self._kv is not None:
            self._prepared = (model, self._record(model))

    def forget(self) -> None:
        self._program = self._model = self._prepared = None

    def run(self, model: Model, inputs: StepInputs) -> StepOutputs:
        if self._program is None or self._model is not model:
            self._adopt(model)
        recorded = self._program
        assert recorded is not None, "adopted above"
        outputs = self._outputs_of(len(inputs.logit_rows_R), recorded.vocab_size)
        if self._group is not None and self._group.rank == 0:
            post_inputs(self._group, inputs)
        hidden = None
        if inputs.hidden_rows_U is not None:
            hidden = inputs.hidden_rows_U, np.empty((len(inputs.hidden_rows_U), recorded.hidden_size), np.float32)
        recorded.program.run(
            *arrays_of(inputs),
            (outputs.logits_RV, outputs.best_R, outputs.finite_R),
            hidden,
        )
        return outputs if hidden is None else replace(outputs, hidden_UD=hidden[1])

    def draw(self, draws: list[Draw]) -> list[int]:
        return _native.draw(self._pool, draws)

    def _outputs_of(self, num_rows: int, width: int) -> StepOutputs:
        if self._group is not None:
            logits = self._group.logits(num_rows, width)
            if self._shared_bytes > max(logits.nbytes, KEPT_ROWS * width * 4) and self._group.rank == 0:
                self._group.trim_logits(KEPT_ROWS * width * 4, self._shared_bytes)
                self._shared_bytes = 0
            self._shared_bytes = max(self._shared_bytes, logits.nbytes)
            return StepOutputs(logits, np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_))
        if num_rows > KEPT_ROWS:
            return outputs_of(num_rows, width)
        if self._kept.logits_RV.shape[1] != width:
            self._kept = outputs_of(KEPT_ROWS, width)
        if self._outputs.logits_RV.shape != (num_rows, width):
            kept = self._kept
            self._outputs = StepOutputs(kept.logits_RV[:num_rows], kept.best_R[:num_rows], kept.finite_R[:num_rows])
        return self._outputs

    def _adopt(self, model: Model) -> None:
        prepared, self._prepared = self._prepared, None
        is_prepared = prepared is not None and prepared[0] is model and prepared[1].kv is self._kv
        self._program = prepared[1] if prepared is not None and is_prepared else self._record(model)
        self._model = model

    def _record(self, model: Model) -> RecordedProgram:
        assert self._kv is not None, "allocate_kv comes before the first step"
        program = _native.Program(self._pool, self._group)
        vocab_size, hidden_size = record(model, program)
        program.use_kv(self._kv)
        return RecordedProgram(program, vocab_size, hidden_size, self._kv)
