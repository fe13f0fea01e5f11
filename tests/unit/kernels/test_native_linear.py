"""Linear layers and embedding of the compiled kernels, for every kind of weight, on each instruction set.

Two comparisons. The kernels round activations to 8 bits per group of 32, all but a number that is more than twice as
large as the others of its group, and some weights once more while packing; numpy does the same roundings in float64,
and what remains is float32 addition, so results agree to 1e-5 of the sum of the terms' sizes. And against unrounded
arithmetic the error stays under the bound that follows from these roundings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.kernels import Backend
from headrace.kernels.reference import BlasArithmetic, ReferenceBackend
from headrace.testing.op_models import float_tensor, on_rows, random_tensor, run_rows
from headrace.weights.tensor import CheckpointTensor, TensorKind

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 129)
MOST_ROWS = 300
FLOATS = {TensorKind.F32, TensorKind.F16, TensorKind.BF16}
SUPER_BLOCKS = {TensorKind.Q4_K, TensorKind.Q5_K, TensorKind.Q6_K}
ROUNDED_AGAIN = {TensorKind.Q5_0, TensorKind.Q5_1, TensorKind.Q5_K, TensorKind.Q6_K}
FLOAT_TERM = 1e-5  # float32 additions, of at most 512 terms


def groups(values: np.ndarray) -> np.ndarray:
    """[rows, groups, 32] in float32, padded with zeros."""
    padding = -values.shape[1] % 32
    return np.pad(values, ((0, 0), (0, padding))).reshape(values.shape[0], -1, 32).astype(np.float32)


def ungrouped(values: np.ndarray, cols: int) -> np.ndarray:
    return values.reshape(values.shape[0], -1)[:, :cols].astype(np.float64)


def as_w8(values: np.ndarray) -> np.ndarray:
    """Symmetric 8 bits per group of 32, with an fp16 scale."""
    x = groups(values)
    scale = (np.abs(x).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    q = np.clip(np.rint(x * inverse), -127, 127)
    return ungrouped(q * scale.astype(np.float64), values.shape[1])


def without_outliers(x: np.ndarray) -> np.ndarray:
    """Groups of activations; where the largest number is more than twice the second, it is set to zero."""
    rest = groups(x)
    largest = np.abs(rest).argmax(axis=2)[:, :, None]
    sizes = np.sort(np.abs(rest), axis=2)
    is_outlier = sizes[:, :, -1:] > 2 * sizes[:, :, -2:-1]
    np.put_along_axis(rest, largest, np.where(is_outlier, 0, np.take_along_axis(rest, largest, axis=2)), axis=2)
    return rest


def steps(x: np.ndarray) -> np.ndarray:
    """[rows, groups, 1]: what one step of a group's 8 bits stands for."""
    return np.abs(without_outliers(x)).max(axis=2, keepdims=True) / np.float32(127)


def as_activations(x: np.ndarray) -> np.ndarray:
    """8 bits per group of 32, but for outliers, which stay as they are."""
    step = steps(x).astype(np.float64)
    rest = without_outliers(x)
    q = np.rint(rest / np.where(step > 0, step, 1))
    return ungrouped(np.where(rest == groups(x), q * step, groups(x)), x.shape[1])


def as_w4(values: np.ndarray) -> np.ndarray:
    """Sixteen levels from a minimum per group of 32."""
    x = groups(values)
    low, high = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    minimum = low.astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    q = np.clip(np.rint((x - minimum) * inverse), 0, 15)
    return ungrouped(q * scale.astype(np.float64) + minimum, values.shape[1])


def as_packed(tensor: CheckpointTensor, quantization: str | None = None) -> np.ndarray:
    """What the packed weight stands for, in float64."""
    values = tensor.dequantize()
    if tensor.kind in FLOATS and quantization is not None:
        return as_w4(values) if quantization == "w4" else as_w8(values)
    if tensor.kind in ROUNDED_AGAIN:
        return as_w8(values)
    return values.astype(np.float64)


def is_float_path(tensor: CheckpointTensor, quantization: str | None) -> bool:
    return tensor.kind in FLOATS and quantization is None


def expected(x: np.ndarray, tensor: CheckpointTensor, quantization: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The result with all roundings of the kernels but those of float32 sums, and how far these may be off."""
    weight = as_packed(tensor, quantization)
    rounded = x.astype(np.float64) if is_float_path(tensor, quantization) else as_activations(x)
    slack = FLOAT_TERM * (np.abs(rounded) @ np.abs(weight).T)
    if tensor.kind is TensorKind.Q4_K:  # scales and minimums of sub-blocks are rounded to fp16
        slack += 2.0**-11 * (np.abs(rounded) @ (np.abs(weight) + 2 * group_span(weight)).T)
    return rounded @ weight.T, slack


def group_span(weight: np.ndarray) -> np.ndarray:
    """Largest size within each group of 32, for each of its numbers."""
    top = np.abs(weight.reshape(weight.shape[0], -1, 32)).max(axis=2, keepdims=True)
    return np.repeat(top, 32, axis=2).reshape(weight.shape)


def on_grid(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Activations that 8 bits and an outlier in every other group hold exactly: nothing is nearly a tie, so numpy and
    the kernels round alike."""
    q = rng.integers(-126, 127, shape).astype(np.float32)
    for column in (0, 2):  # two of them: neither is an outlier in a group of few numbers
        q[:, column::32] = 127 * rng.choice([-1, 1], q[:, column::32].shape)
    outliers = rng.uniform(255, 900, q[:, 1::32].shape) * rng.choice([-1, 1], q[:, 1::32].shape)
    q[:, 1::32] = np.where(rng.integers(0, 2, outliers.shape), outliers, q[:, 1::32])
    scales = np.exp2(rng.integers(-8, 3, (shape[0], -(-shape[1] // 32)))).astype(np.float32)
    return q * np.repeat(scales, 32, axis=1)[:, : shape[1]]


def linear(
    x: np.ndarray,
    parts: list[CheckpointTensor],
    *,
    quantization: str | None = None,
    bias: list[CheckpointTensor] | None = None,
    num_threads: int = 1,
) -> np.ndarray:
    """Packed by one backend and run by another, which leaves the table of activations as it is."""
    weight = NativeBackend(1, quantization).packer().pack_linear(parts, bias)
    return run_rows(on_rows(x, lambda ops, x, w: ops.linear(x, w), lambda _: weight), x, NativeBackend(num_threads))


def input_sizes(kind: TensorKind, quantization: str | None) -> tuple[int, ...]:
    if kind in FLOATS:
        return (1, 31, 33, 100)
    return (256, 512) if kind in SUPER_BLOCKS else (32, 96, 256)


CASES = [(kind, None) for kind in TensorKind] + [
    (TensorKind.F32, "w8"),
    (TensorKind.BF16, "w8"),
    (TensorKind.F16, "w4"),
]


@pytest.mark.parametrize(("kind", "quantization"), CASES, ids=[f"{k.label}-{q or 'as-is'}" for k, q in CASES])
def test_linear(instruction_set: str, rng: np.random.Generator, kind: TensorKind, quantization: str | None) -> None:
    for num_inputs in input_sizes(kind, quantization):
        for num_outputs in (1, 15, 17, 33):
            tensor = random_tensor(kind, (num_outputs, num_inputs), rng)
            x = on_grid(rng, (MOST_ROWS if num_outputs == 17 else 35, num_inputs))
            y = linear(x, [tensor], quantization=quantization)
            exact, slack = expected(x, tensor, quantization)
            assert y.shape == exact.shape
            np.testing.assert_array_less(np.abs(y - exact), slack + 1e-30)


@pytest.mark.parametrize(("kind", "quantization"), CASES, ids=[f"{k.label}-{q or 'as-is'}" for k, q in CASES])
def test_error_against_unrounded_arithmetic(
    instruction_set: str, rng: np.random.Generator, kind: TensorKind, quantization: str | None
) -> None:
    tensor = random_tensor(kind, (33, 256), rng)
    x = rng.standard_normal((40, 256)).astype(np.float32) * np.exp(rng.standard_normal((40, 1))).astype(np.float32)
    y = linear(x, [tensor], quantization=quantization)
    true = tensor.dequantize().astype(np.float64)
    packed = as_packed(tensor, quantization)
    bound = np.abs(x) @ (np.abs(packed - true) + 1e-5 * np.abs(packed)).T
    if kind is TensorKind.Q4_K:
        bound += 2.0**-10 * (np.abs(x) @ group_span(packed).T)
    if not is_float_path(tensor, quantization):  # each activation is off by half a step at most
        bound += 0.501 * np.repeat(steps(x)[:, :, 0], 32, axis=1) @ np.abs(packed).T
    np.testing.assert_array_less(np.abs(y - x @ true.T), bound)
    relative = np.linalg.norm(y - x @ true.T) / np.linalg.norm(x @ true.T)
    assert relative < (0.1 if quantization == "w4" else 0.01), "roundings are random: most of them cancel"


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", [TensorKind.Q4_1, TensorKind.Q8_0, TensorKind.F16])
def test_rows_do_not_meet(instruction_set: str, rng: np.random.Generator, kind: TensorKind, num_threads: int) -> None:
    """With any number of rows each row has the bits that it has among 300."""
    tensor = random_tensor(kind, (49, 96), rng)
    x = rng.standard_normal((MOST_ROWS, 96)).astype(np.float32)
    all_rows = linear(x, [tensor], num_threads=num_threads)
    for count in ROW_COUNTS:
        first = int(rng.integers(0, MOST_ROWS - count + 1))
        some = linear(x[first : first + count], [tensor], num_threads=num_threads)
        assert some.tobytes() == all_rows[first : first + count].tobytes(), count


def test_stacked_parts_of_mixed_kinds_with_biases(instruction_set: str, rng: np.random.Generator) -> None:
    kinds = [TensorKind.Q4_K, TensorKind.F32, TensorKind.Q8_0, TensorKind.BF16, TensorKind.Q6_K, TensorKind.Q4_0]
    parts = [random_tensor(kind, (size, 256), rng) for kind, size in zip(kinds, (33, 5, 16, 17, 1, 48), strict=True)]
    biases = [float_tensor(rng.standard_normal(part.shape[0])) for part in parts]
    x = on_grid(rng, (19, 256))
    y = linear(x, parts, bias=biases, num_threads=2)
    start = 0
    for part, bias in zip(parts, biases, strict=True):
        exact, slack = expected(x, part, None)
        exact += bias.dequantize()
        found = y[:, start : start + part.shape[0]]
        np.testing.assert_array_less(np.abs(found - exact), slack + 1e-6 * np.abs(exact) + 1e-6)
        start += part.shape[0]
    assert start == y.shape[1]


@pytest.mark.parametrize(("kind", "quantization"), CASES, ids=[f"{k.label}-{q or 'as-is'}" for k, q in CASES])
def test_embed(instruction_set: str, rng: np.random.Generator, kind: TensorKind, quantization: str | None) -> None:
    cols = 256 if kind in SUPER_BLOCKS else 37 if kind in FLOATS else 96
    table = random_tensor(kind, (37, cols), rng)

    def build(backend: Backend) -> Any:
        packed = backend.packer().pack_table(table)
        return lambda ops: ops.scale(ops.logit_rows(ops.embed(packed)), 1.0)

    y = run_rows(build, np.empty((37, cols)), NativeBackend(2, quantization))
    packed = as_packed(table, quantization)
    slack = 2.0**-9 * group_span(packed) if kind is TensorKind.Q4_K else 2.0**-22 * np.abs(packed).max()
    np.testing.assert_array_less(np.abs(y - packed), slack + 1e-12)


def test_tied_table_is_a_linear_layer_too(instruction_set: str, rng: np.random.Generator) -> None:
    table = random_tensor(TensorKind.Q8_0, (21, 64), rng)

    def build(backend: Backend) -> Any:
        packed = backend.packer().pack_table(table)
        return lambda ops: ops.linear(ops.logit_rows(ops.embed(packed)), packed)

    y = run_rows(build, np.empty((21, 64)), NativeBackend(2))
    reference = run_rows(build, np.empty((21, 64)), ReferenceBackend("reference", BlasArithmetic()))
    # a row of Q8_0 times 127 / top is on the grid of 8 bits again, up to the rounding of the scale
    np.testing.assert_allclose(y, reference, rtol=0.02, atol=0.02 * np.abs(reference).max())


@pytest.mark.parametrize("quantization", [None, "w8", "w4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weight_that_is_not_finite_shows(instruction_set: str, bad: float, quantization: str | None) -> None:
    """Its output is not finite; the other outputs are what they were."""
    weight = np.ones((20, 40), np.float32)
    x = np.ones((3, 40), np.float32)
    good = linear(x, [float_tensor(weight)], quantization=quantization)
    weight[17, 33] = bad
    y = linear(x, [float_tensor(weight)], quantization=quantization)
    assert not np.isfinite(y[:, 17]).any()
    others = np.arange(20) != 17
    assert y[:, others].tobytes() == good[:, others].tobytes()


@pytest.mark.parametrize("kind", [TensorKind.Q4_1, TensorKind.Q8_0, TensorKind.F32, TensorKind.BF16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activation_that_is_not_finite_shows(
    instruction_set: str, rng: np.random.Generator, kind: TensorKind, bad: float
) -> None:
    """Its row is not finite; the other rows are what they were."""
    weight = random_tensor(kind, (20, 64), rng)
    x = rng.standard_normal((9, 64)).astype(np.float32)
    good = linear(x, [weight])
    x[4, 33] = bad
    y = linear(x, [weight])
    assert not np.isfinite(y[4]).any()
    others = np.arange(9) != 4
    assert y[others].tobytes() == good[others].tobytes()


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-37, 1e-36, 1e-30, 1e30])
def test_activations_of_any_size(instruction_set: str, rng: np.random.Generator, size: float) -> None:
    """Numbers near the ends of float32, with zeros among them, never become something else."""
    weight = random_tensor(TensorKind.Q4_1, (20, 64), rng)
    x = (rng.standard_normal((4, 64)) * size).astype(np.float32)
    x[:, ::3] = 0
    y = linear(x, [weight])
    true = x.astype(np.float64) @ weight.dequantize().T.astype(np.float64)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y, true, rtol=0, atol=0.02 * np.abs(true).max() + 1e-35)
