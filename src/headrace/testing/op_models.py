"""Models of a few ops, and tensors to feed them: for tests that compare kernels with those of another backend or numpy.

A model takes its activations from an embedding table of plain float32, so token id i stands for row i of an array. Used
with `testing/steps.py`. It says nothing of what is right: the tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.kernels import Backend
from headrace.kernels.ops import KVSpec, Ops, StepInputs, Tensor
from headrace.weights.tensor import CheckpointTensor, TensorKind

Forward = Callable[[Ops], Tensor]
Build = Callable[[Backend], Forward]
"""Packs weights into a backend and answers with the forward function over them."""

HALF_OFFSETS = {
    TensorKind.Q4_0: (0,), TensorKind.Q4_1: (0, 2), TensorKind.Q5_0: (0,), TensorKind.Q5_1: (0, 2),
    TensorKind.Q8_0: (0,), TensorKind.Q4_K: (0, 2), TensorKind.Q5_K: (0, 2), TensorKind.Q6_K: (208,),
}  # fmt: skip
"""Where fp16 scales and minimums lie in a block."""


@dataclass(frozen=True, slots=True)
class OpModel:
    """A `Model` and the shape of its KV memory; has what `Runner` wants of a loaded model."""

    run_ops: Forward
    kv_spec: KVSpec = field(default_factory=lambda: KVSpec(1, 1, 16))

    @property
    def decoder(self) -> OpModel:
        return self

    def forward(self, ops: Ops) -> Tensor:
        return self.run_ops(ops)


def float_tensor(values: np.ndarray, kind: TensorKind = TensorKind.F32) -> CheckpointTensor:
    """The values stored as F32, F16 or BF16 (cut off, not rounded)."""
    values = np.ascontiguousarray(values, np.float32)
    data: np.ndarray = values
    if kind is TensorKind.F16:
        data = values.astype(np.float16)
    elif kind is TensorKind.BF16:
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
    return CheckpointTensor("test", values.shape, kind, data.reshape(-1).view(np.uint8))


def random_tensor(kind: TensorKind, shape: tuple[int, int], rng: np.random.Generator) -> CheckpointTensor:
    """Every bit of a quantised block is random, but for its fp16 scales, which are of the size that encoders write."""
    if kind not in HALF_OFFSETS:
        return float_tensor(rng.standard_normal(shape) / np.sqrt(shape[1]), kind)
    num_blocks = shape[0] * shape[1] // kind.block_size
    assert num_blocks * kind.block_size == shape[0] * shape[1], "rows fill whole blocks"
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), np.uint8)
    if kind is TensorKind.Q8_0:
        blocks[blocks == 128] = 127  # -128, which no encoder writes
    for offset in HALF_OFFSETS[kind]:
        halves = (rng.standard_normal(num_blocks) * 0.01).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    return CheckpointTensor("test", shape, kind, blocks.reshape(-1))


def step_of(num_rows: int, wanted: list[int] | None = None) -> StepInputs:
    """One sequence's first step: token ids 0, 1, 2, ... in blocks of 16; logits of the wanted rows, or all."""
    rows = np.arange(num_rows, dtype=np.int32)
    return StepInputs(
        token_ids_T=rows,
        positions_T=rows,
        kv_slots_T=rows.astype(np.int64),
        query_starts=np.array([0, num_rows], np.int32),
        context_lens_S=np.array([num_rows], np.int32),
        block_tables_SB=np.arange(-(-num_rows // 16), dtype=np.int32)[None, :],
        logit_rows_R=rows if wanted is None else np.array(wanted, np.int32),
    )


def run_rows(build: Build, x_TD: np.ndarray, backend: Backend, wanted: list[int] | None = None) -> np.ndarray:
    """Runs `build`'s model, which embeds the rows of `x_TD`, in one step."""
    num_rows = x_TD.shape[0]
    backend.allocate_kv(KVSpec(1, 1, 16), -(-num_rows // 16), 16)
    return backend.run(OpModel(build(backend)), step_of(num_rows, wanted)).logits_RV.copy()


def on_rows(x_TD: np.ndarray, apply: Callable[[Ops, Tensor, Any], Tensor], pack: Callable[[Backend], Any]) -> Build:
    """`apply(ops, x, packed)` over the rows of an array, then the selection of rows that ends every model."""

    def build(backend: Backend) -> Forward:
        table, packed = backend.packer().pack_table(float_tensor(x_TD)), pack(backend)
        return lambda ops: ops.scale(ops.logit_rows(apply(ops, ops.embed(table), packed)), 1.0)

    return build
