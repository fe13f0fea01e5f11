"""The recorder: a buffer is never handed on while somebody still reads it, and nothing is fused where that shows.

Random programs of ops are recorded twice, as the backend does and with a buffer for every value and nothing fused: the
bits must be the same. And those without 8-bit weights must agree with the numpy backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import Backend, create_backend
from headrace.kernels.ops import MoeSpec, RoutingSpec
from headrace.testing.op_models import float_tensor, run_rows, step_of

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native import recorder
from headrace.kernels.native.backend import NativeBackend
from headrace.kernels.native.emitter import Emitter
from headrace.kernels.native.steps import Step as RecordedStep
from headrace.kernels.native.steps import fuse_residuals

D = 32
RNG = np.random.default_rng(5)
X = RNG.standard_normal((7, D)).astype(np.float32)
MOE = MoeSpec(routing=RoutingSpec(num_experts=2, num_per_token=1), activation="silu", inner_size=D)
NORM = RNG.standard_normal(D).astype(np.float32)
WEIGHTS = {
    (num_inputs, num_outputs): (RNG.standard_normal((num_outputs, num_inputs)) / np.sqrt(num_inputs)).astype(np.float32)
    for num_inputs in (D, 2 * D)
    for num_outputs in (D, 2 * D)
}


class Ops:
    """What a step of a random program may do: reads two values of width D, appends one or two."""

    def __init__(self, ops: Any, weights: dict[Any, Any], norm: Any) -> None:
        self.ops, self.weights, self.norm = ops, weights, norm

    def linear(self, x: Any, num_inputs: int = D, num_outputs: int = D, kind: str = "f32") -> Any:
        return self.ops.linear(x, self.weights[kind, num_inputs, num_outputs])

    def scale(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.scale(a, 0.5)]

    def add(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.scale(self.ops.add(a, b), 0.5)]

    def normed(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.rms_norm(a, self.norm, 1e-5)]

    def layer(self, a: Any, b: Any) -> list[Any]:
        return [self.linear(a)]

    def layer_with_residual(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.add(a, self.linear(b))]

    def layer_with_residual_of_itself(self, a: Any, b: Any) -> list[Any]:
        y = self.linear(a)
        return [self.ops.add(y, y)]

    def layer_with_residual_and_more_readers(self, a: Any, b: Any) -> list[Any]:
        y = self.linear(b)
        return [self.ops.add(a, y), y]

    def layer_with_residual_behind(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.add(self.linear(b), a)]

    def half_of_a_layer_with_residual(self, a: Any, b: Any) -> list[Any]:
        low, _ = self.ops.split(self.linear(b, D, 2 * D), (D, D))
        return [self.ops.add(a, low)]

    def layers_of_a_pair(self, a: Any, b: Any) -> list[Any]:
        return list(self.ops.split(self.linear(a, D, 2 * D), (D, D)))

    def mlp(self, a: Any, b: Any) -> list[Any]:
        wide = self.ops.gated(self.linear(a, D, 2 * D), self.linear(b, D, 2 * D), "silu")
        return [self.ops.add(b, self.linear(wide, 2 * D, D))]

    def two_kinds_of_layer(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.add(self.linear(a), self.linear(a, kind="f32")), self.linear(b), self.linear(a)]

    def capped(self, a: Any, b: Any) -> list[Any]:
        return [self.ops.soft_cap(a, 3.0)]

    def gated_by_row(self, a: Any, b: Any) -> list[Any]:
        gate, _ = self.ops.split(b, (1, D - 1))
        return [self.ops.gate_rows(a, gate)]


class EightBitOps(Ops):
    """Its layers share the buffers of quantised inputs."""

    def linear(self, x: Any, num_inputs: int = D, num_outputs: int = D, kind: str = "w8") -> Any:
        return super().linear(x, num_inputs, num_outputs, kind)


class ExpertOps(Ops):
    """Has experts in the place of the MLP."""

    def mlp(self, a: Any, b: Any) -> list[Any]:
        scores, _ = self.ops.split(b, (2, D - 2))
        return [self.ops.add(b, self.ops.moe(a, scores, None, self.weights["experts"], MOE))]


NAMES = tuple(name for name in vars(Ops) if name not in ("__init__", "linear") and not name.startswith("_"))
Step = tuple[str, int, int]
step_lists = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5), st.integers(0, 5)), max_size=14)


def program(front: list[Step], back: list[Step], kind: type[Ops]) -> Callable[[Backend], Any]:
    """Steps read among the six values made last; `back` runs on the wanted rows. Every third value is in the result."""

    def build(backend: Backend) -> Any:
        table, norm = backend.packer().pack_table(float_tensor(X)), backend.packer().pack_vector(float_tensor(NORM))
        packers: dict[str, Any] = {"f32": backend.packer()}
        if isinstance(backend, NativeBackend):
            packers["w8"] = NativeBackend(1, "w8").packer()
        weights: dict[Any, Any] = {
            (name, *shape): packer.pack_linear([float_tensor(weight)])
            for name, packer in packers.items()
            for shape, weight in WEIGHTS.items()
        }

        experts = weights["experts"] = backend.experts(2)
        expert = weights["f32", D, 2 * D], weights["f32", D, D]
        experts.place(np.arange(2), dict.fromkeys(range(2), expert))

        def forward(ops: Any) -> Any:
            steps = kind(ops, weights, norm)

            def total(values: list[Any], todo: list[Step]) -> Any:
                for name, first, second in todo:
                    a, b = (values[-1 - i % len(values)] for i in (first, second))
                    values += getattr(steps, name)(a, b)
                result = steps.linear(values[-1])
                for value in values[::3]:
                    result = ops.add(ops.rms_norm(value, norm, 1e-5), result)
                return result

            return total([ops.logit_rows(total([ops.embed(table)], front))], back)

        return forward

    return build


class Forgetful(dict[Any, Any]):
    """Never has what was put in."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def record_plainly(model: Any, program: Any) -> tuple[int, int]:
    """Every value has a buffer to the end, every input is quantised anew, nothing is fused."""
    seen = recorder.Recorder()
    logits = model.forward(seen)
    Emitter(program, free=Forgetful(), quantized_symbol=Forgetful()).run(seen.steps)
    return logits.width, 0


def run_plainly(build: Callable[[Backend], Any], wanted: list[int]) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.kernels.native.backend.record", record_plainly)
        return run_rows(build, X, NativeBackend(1), wanted)


@given(front=step_lists, back=step_lists, kind=st.sampled_from([Ops, EightBitOps, ExpertOps]))
@settings(max_examples=150, deadline=None)
def test_buffers_are_not_handed_on_too_soon(front: list[Step], back: list[Step], kind: type[Ops]) -> None:
    build, wanted = program(front, back, kind), [4, 0, 6] * 9  # more rows than tokens
    found = run_rows(build, X, NativeBackend(2), wanted)
    assert np.isfinite(found).all()
    assert found.tobytes() == run_plainly(build, wanted).tobytes()


@given(front=step_lists, back=step_lists)
@settings(max_examples=50, deadline=None)
def test_programs_compute_what_numpy_does(front: list[Step], back: list[Step]) -> None:
    build, wanted = program(front, back, Ops), [6, 1]
    found, expected = (
        run_rows(build, X, backend, wanted) for backend in (NativeBackend(1), create_backend("reference"))
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def recorded(apply: Callable[[Any, Any, Any], Any]) -> list[RecordedStep]:
    """The steps behind an embedding and a norm of it, fused."""
    backend = NativeBackend(1)
    weight = backend.packer().pack_linear([float_tensor(WEIGHTS[D, D]), float_tensor(WEIGHTS[D, D])])
    seen = recorder.Recorder()
    x = seen.embed(backend.packer().pack_table(float_tensor(X)))
    apply(seen, x, weight)
    return fuse_residuals(seen.steps)[1:]


def test_residual_is_fused() -> None:
    steps = recorded(lambda ops, x, w: ops.scale(ops.add(ops.scale(x, 2.0), ops.linear(x, w)), 3.0))
    assert [step.kind for step in steps] == ["scale", "linear", "scale"]
    assert steps[1].residual == steps[0].output
    assert steps[2].inputs == (steps[1].output,)


def test_one_residual_is_fused() -> None:
    steps = recorded(lambda ops, x, w: ops.add(ops.scale(x, 2.0), ops.add(ops.scale(x, 3.0), ops.linear(x, w))))
    assert [step.kind for step in steps] == ["scale", "scale", "linear", "add"]
    assert steps[2].residual == steps[1].output
    assert steps[3].inputs == (steps[0].output, steps[2].output)


NOT_FUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "read again later": lambda ops, x, w: [y := ops.linear(x, w), ops.add(ops.scale(x, 1.0), y), ops.scale(y, 2.0)],
    "is its own residual": lambda ops, x, w: [y := ops.linear(x, w), ops.add(y, y)],
    "half of it": lambda ops, x, w: ops.add(x, ops.split(ops.linear(x, w), (D, D))[0]),
    "half of it twice": lambda ops, x, w: [
        halves := ops.split(ops.linear(x, w), (D, D)),
        ops.add(halves[1], halves[0]),
    ],
    "something between": lambda ops, x, w: [y := ops.linear(x, w), z := ops.scale(x, 2.0), ops.add(z, y)],
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_residual_is_not_fused(name: str) -> None:
    steps = recorded(NOT_FUSED[name])
    assert "add" in [step.kind for step in steps]
    assert all(step.residual is None for step in steps)


def test_weights_live_as_long_as_the_program() -> None:
    """The model lets go of them after recording; the program still holds them."""
    held: dict[str, Any] = {}

    def build(backend: Backend) -> Any:
        table = backend.packer().pack_table(float_tensor(X))
        held["weight"] = backend.packer().pack_linear([float_tensor(WEIGHTS[D, D])])
        return lambda ops: ops.linear(ops.logit_rows(ops.embed(table)), held["weight"])

    backend = NativeBackend(1)
    first = run_rows(build, X, backend)
    model, program = backend._model, backend._program
    held.clear()
    others = [backend.packer().pack_linear([float_tensor(np.full((D, D), np.nan, np.float32))]) for _ in range(8)]
    assert others
    assert program is backend._program
    again = backend.run(model, step_of(len(X))).logits_RV
    assert again.tobytes() == first.tobytes()
