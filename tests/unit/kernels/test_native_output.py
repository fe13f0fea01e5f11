"""What a step says of its logits, however they are made: the first largest of each row, whether the row is finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.kernels import Backend
from headrace.kernels.ops import KVSpec, StepOutputs
from headrace.testing.op_models import OpModel, float_tensor, step_of

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

pytestmark = pytest.mark.usefixtures("instruction_set")

NUM_ROWS = 40
X = np.random.default_rng(2).integers(-2, 3, (NUM_ROWS, 6)).astype(np.float32)
X[:, 4:] = 0
X[3, 4] = X[17, 5] = X[39, 4] = X[39, 5] = 3e38
"""Small integers, so that many logits are equal; where columns 4 and 5 count, a row overflows to inf, -inf or NaN."""
BAD_ROWS = [3, 17, 39]

Head = Callable[[Backend, np.ndarray], Callable[[Any, Any], Any]]


def linear(backend: Backend, weights: np.ndarray) -> Callable[[Any, Any], Any]:
    head = backend.packer().pack_linear([float_tensor(weights)])
    return lambda ops, x: ops.linear(x, head)


def with_bias(backend: Backend, weights: np.ndarray) -> Callable[[Any, Any], Any]:
    bias = float_tensor(np.arange(len(weights)) % 2)
    head = backend.packer().pack_linear([float_tensor(weights)], [bias])
    return lambda ops, x: ops.linear(x, head)


def in_two_parts(backend: Backend, weights: np.ndarray) -> Callable[[Any, Any], Any]:
    parts = [float_tensor(weights[: len(weights) // 2]), float_tensor(weights[len(weights) // 2 :])]
    head = backend.packer().pack_linear(parts)
    return lambda ops, x: ops.linear(x, head)


def capped(backend: Backend, weights: np.ndarray) -> Callable[[Any, Any], Any]:
    apply = linear(backend, weights)
    return lambda ops, x: ops.soft_cap(apply(ops, x), 5.0)


def added(backend: Backend, weights: np.ndarray) -> Callable[[Any, Any], Any]:
    apply = linear(backend, weights)
    return lambda ops, x: ops.add(ops.scale(apply(ops, x), 0.0), apply(ops, x))


def outputs_of(head: Head, weights: np.ndarray, num_threads: int) -> StepOutputs:
    backend = NativeBackend(num_threads)
    backend.allocate_kv(KVSpec(1, 1, 16), 3, 16)
    table, apply = backend.packer().pack_table(float_tensor(X)), head(backend, weights)
    model = OpModel(lambda ops: apply(ops, ops.logit_rows(ops.embed(table))))
    backend.run(model, step_of(NUM_ROWS))
    return backend.run(model, step_of(NUM_ROWS))


@pytest.mark.parametrize("head", [linear, with_bias, in_two_parts, capped, added])
@pytest.mark.parametrize("width", [2, 16, 100, 128, 129, 1000])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_best_and_finite(rng: np.random.Generator, head: Head, width: int, num_threads: int) -> None:
    weights = rng.integers(-2, 3, (width, 6)).astype(np.float32)
    weights[:, 4:] = 0
    bad = rng.integers(width)
    weights[bad, 4:] = 10, -10
    outputs = outputs_of(head, weights, num_threads)
    logits = outputs.logits_RV
    expected = np.isfinite(logits).all(axis=1)
    np.testing.assert_array_equal(outputs.finite_R, expected)
    if head is not capped:  # which makes infinities finite
        assert np.flatnonzero(~expected).tolist() == BAD_ROWS
    np.testing.assert_array_equal(outputs.best_R[expected], logits[expected].argmax(axis=1))
    assert ((outputs.best_R >= 0) & (outputs.best_R < width)).all()


def test_a_step_without_logits() -> None:
    backend = NativeBackend(2)
    backend.allocate_kv(KVSpec(1, 1, 16), 3, 16)
    table, apply = backend.packer().pack_table(float_tensor(X)), linear(backend, X)
    outputs = backend.run(OpModel(lambda ops: apply(ops, ops.logit_rows(ops.embed(table)))), step_of(NUM_ROWS, []))
    assert outputs.logits_RV.shape == (0, NUM_ROWS)
    assert outputs.best_R.shape == outputs.finite_R.shape == (0,)
