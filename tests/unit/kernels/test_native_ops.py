"""Norms, rotary embedding, gated activations and elementwise ops of the compiled kernels, against float64 or the numpy
backend, on each instruction set. Tolerances are a few units in the last place of float32 for each step an op takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.kernels import Backend
from headrace.kernels.ops import Ops, RopeSpec, Tensor
from headrace.kernels.reference import BlasArithmetic, ReferenceBackend
from headrace.testing.op_models import Build, float_tensor, on_rows, run_rows

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

pytestmark = pytest.mark.usefixtures("instruction_set")
Apply = Callable[[Ops, Tensor, Any], Tensor]
WIDTHS = (1, 15, 16, 17, 33, 64, 100)
erf = np.vectorize(math.erf, otypes=[np.float64])


def native(x: np.ndarray, apply: Apply, packed: np.ndarray | None = None, num_threads: int = 1) -> np.ndarray:
    return run_rows(_build(x, apply, packed), x, NativeBackend(num_threads))


def reference(x: np.ndarray, apply: Apply, packed: np.ndarray | None = None) -> np.ndarray:
    return run_rows(_build(x, apply, packed), x, ReferenceBackend("reference", BlasArithmetic()))


def _build(x: np.ndarray, apply: Apply, packed: np.ndarray | None) -> Build:
    def pack(backend: Backend) -> Any:
        return None if packed is None else backend.packer().pack_vector(float_tensor(packed))

    return on_rows(x, apply, pack)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("width", [*WIDTHS, 576])
@pytest.mark.parametrize(("heads", "num_threads"), [(1, 1), (3, 2)])
def test_rms_norm(rng: np.random.Generator, width: int, heads: int, num_threads: int) -> None:
    x, weight = normal(rng, 17, heads * width, scale=3), normal(rng, width)
    x[5] *= 1e-8  # eps counts
    y = native(x, lambda ops, x, w: ops.rms_norm(ops.heads(x, heads), w, 1e-6), weight, num_threads)
    by_head = x.reshape(17, heads, width).astype(np.float64)
    exact = by_head / np.sqrt((by_head**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(y, exact.reshape(17, -1), rtol=2e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (64, 64), (80, 80), (64, 16), (24, 6), (128, 32)])
def test_rope(rng: np.random.Generator, head_dim: int, rotated: int, is_interleaved: bool) -> None:
    heads, num_rows = 3, 70
    inv_freq = (10000.0 ** -(np.arange(0, rotated, 2) / rotated)).astype(np.float32)
    spec = RopeSpec(inv_freq, is_interleaved, 1.25)
    x = normal(rng, num_rows, heads * head_dim)
    y = native(x, lambda ops, x, _: ops.rope(ops.heads(x, heads), spec)).reshape(num_rows, heads, head_dim)
    angle = (np.arange(num_rows, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    turn = (np.cos(angle) + 1j * np.sin(angle))[:, None] * 1.25
    by_head = x.reshape(num_rows, heads, head_dim).astype(np.float64)
    half = rotated // 2
    low, high = (slice(0, rotated, 2), slice(1, rotated, 2)) if is_interleaved else (slice(half), slice(half, rotated))
    turned = (by_head[..., low] + 1j * by_head[..., high]) * turn
    exact = by_head.copy()
    exact[..., low], exact[..., high] = turned.real, turned.imag
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(y[..., rotated:], by_head[..., rotated:])


def test_rope_far_from_the_start_and_two_kinds_of_it(rng: np.random.Generator) -> None:
    near = RopeSpec((10000.0 ** -(np.arange(0, 16, 2) / 16)).astype(np.float32), False)
    far = RopeSpec((1e6 ** -(np.arange(0, 16, 2) / 16)).astype(np.float32), False)
    x = normal(rng, 5000, 16)

    def apply(ops: Ops, x: Tensor, _: Any) -> Tensor:
        x = ops.heads(x, 1)
        return ops.add(ops.rope(x, near), ops.rope(ops.rope(x, far), near))

    np.testing.assert_allclose(native(x, apply), reference(x, apply).reshape(5000, 16), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated(rng: np.random.Generator, activation: str, width: int) -> None:
    x = normal(rng, 33, 2 * width, scale=4)
    x[0], x[1], x[2], x[3] = 90, -90, 0, -0.0

    def apply(ops: Ops, x: Tensor, _: Any) -> Tensor:
        gate, up = ops.split(x, (width, width))
        return ops.gated(gate, up, activation)

    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    exact = {
        "silu": lambda: gate / (1 + np.exp(-gate)),
        "gelu": lambda: gate * 0.5 * (1 + erf(gate / math.sqrt(2))),
        "gelu_tanh": lambda: gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
    }[activation]() * up
    # 1 + tanh loses what the two have in common: absolute to the gate's size
    slack = 3e-6 * np.abs(exact) + 3e-7 * np.abs(gate * up) + 1e-12
    np.testing.assert_array_less(np.abs(native(x, apply) - exact), slack)


@pytest.mark.parametrize("width", WIDTHS)
def test_scale_add_and_soft_cap(rng: np.random.Generator, width: int) -> None:
    x = normal(rng, 19, 3 * width, scale=20)

    def apply(ops: Ops, x: Tensor, _: Any) -> Tensor:
        a, b, c = ops.split(x, (width, width, width))
        return ops.soft_cap(ops.add(ops.scale(a, 1.5), ops.add(b, c)), 30.0)

    a, b, c = np.split(x.astype(np.float64), 3, axis=1)
    exact = 30 * np.tanh((1.5 * a + b + c) / 30)
    np.testing.assert_allclose(native(x, apply, num_threads=2), exact, rtol=1e-6, atol=1e-5)


def test_heads_stay_through_elementwise_ops(rng: np.random.Generator) -> None:
    x, weight = normal(rng, 5, 48), normal(rng, 16)

    def apply(ops: Ops, x: Tensor, w: Any) -> Tensor:
        by_head = ops.heads(x, 3)
        return ops.rms_norm(ops.soft_cap(ops.add(ops.scale(by_head, 2.0), by_head), 5.0), w, 1e-6)

    np.testing.assert_allclose(
        native(x, apply, weight), reference(x, apply, weight).reshape(5, -1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("wanted", [[], [0], [6], [5, 1, 1, 0, 6, 3], list(range(7))], ids=len)
def test_rows_whose_logits_are_wanted(rng: np.random.Generator, wanted: list[int]) -> None:
    x, weight = normal(rng, 7, 40), normal(rng, 23, 40)

    def build(backend: Backend) -> Any:
        table, head = backend.packer().pack_table(float_tensor(x)), backend.packer().pack_linear([float_tensor(weight)])
        return lambda ops: ops.linear(ops.logit_rows(ops.embed(table)), head)

    y = run_rows(build, x, NativeBackend(2), wanted)
    assert y.shape == (len(wanted), 23)
    np.testing.assert_allclose(y, x[wanted].astype(np.float64) @ weight.T, rtol=0, atol=1e-4)


def test_selection_of_rows_may_be_the_last_op(rng: np.random.Generator) -> None:
    x = normal(rng, 7, 40)

    def build(backend: Backend) -> Any:
        table = backend.packer().pack_table(float_tensor(x))
        return lambda ops: ops.logit_rows(ops.embed(table))

    np.testing.assert_array_equal(run_rows(build, x, NativeBackend(2), [4, 0]), x[[4, 0]])


def _soft_cap(ops: Ops, x: Tensor, _: Any) -> Tensor:
    return ops.soft_cap(x, 30.0)


def _gated(activation: str, is_gate_bad: bool) -> Apply:
    def apply(ops: Ops, x: Tensor, _: Any) -> Tensor:
        good = ops.scale(x, 0.0)
        one = ops.rope(good, RopeSpec(np.zeros(1, np.float32), False))  # finite wherever x is
        return ops.gated(*((x, one) if is_gate_bad else (one, x)), activation)

    return apply


ELEMENTWISE: dict[str, Apply] = {
    "soft_cap": _soft_cap,
    "scale": lambda ops, x, _: ops.scale(x, 2.0),
    "add": lambda ops, x, _: ops.add(ops.scale(x, 2.0), x),
} | {
    f"gated-{name}-{'gate' if is_gate else 'up'}": _gated(name, is_gate)
    for name in ("silu", "gelu", "gelu_tanh")
    for is_gate in (True, False)
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_nan_stays_where_it_is(rng: np.random.Generator, name: str) -> None:
    """It neither vanishes (a capped NaN must not be a logit) nor spreads to its neighbours."""
    x = normal(rng, 3, 37)
    good = native(x, ELEMENTWISE[name])
    bad = x.copy()
    bad[1, 20] = bad[2, 36] = np.nan
    y = native(bad, ELEMENTWISE[name])
    np.testing.assert_array_equal(np.isnan(y), np.isnan(bad))
    keep = ~np.isnan(bad)
    assert y[keep].tobytes() == good[keep].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_norm_of_a_bad_row_is_bad(rng: np.random.Generator, bad: float) -> None:
    x, weight = normal(rng, 3, 37), normal(rng, 37)
    good = native(x, lambda ops, x, w: ops.rms_norm(x, w, 1e-6), weight)
    x[1, 35] = bad
    y = native(x, lambda ops, x, w: ops.rms_norm(x, w, 1e-6), weight)
    assert np.isnan(y[1, 35])
    assert y[[0, 2]].tobytes() == good[[0, 2]].tobytes()
