"""Mixture of experts in the compiled kernels: each op against the numpy backend on each instruction set, and its bits
against those of the same rows alone, in other batches, with other threads and with replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace.kernels import Backend
from headrace.kernels.ops import MoeSpec, Ops, RoutingSpec, Tensor
from headrace.kernels.reference import BlasArithmetic, ReferenceBackend
from headrace.testing.op_models import OpModel, float_tensor, random_tensor, run_rows, step_of
from headrace.weights.tensor import CheckpointTensor, TensorKind

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

pytestmark = pytest.mark.usefixtures("instruction_set")
D, F = 64, 48


@dataclass(frozen=True)
class Layer:
    """A layer's experts, as tensors: gate and up, down. `slots` None: one slot each."""

    routing: RoutingSpec
    experts: Sequence[tuple[list[CheckpointTensor], CheckpointTensor]]
    inner_size: int = F
    bias: np.ndarray | None = None
    slots: Sequence[int] | None = None
    placed: dict[str, Any] = field(default_factory=dict)  # the experts of each backend that ran

    def apply(self, backend: Backend) -> Callable[[Ops, Tensor, Tensor], Tensor]:
        packer = backend.packer()
        packed = [(packer.pack_linear(gate_up), packer.pack_linear([down])) for gate_up, down in self.experts]
        slots = np.arange(len(packed)) if self.slots is None else np.array(self.slots)
        experts = self.placed[backend.name] = backend.experts(len(packed))
        experts.place(slots, {slot: packed[expert] for slot, expert in enumerate(slots.tolist())})
        bias = None if self.bias is None else packer.pack_vector(float_tensor(self.bias))
        spec = MoeSpec(routing=self.routing, activation="silu", inner_size=self.inner_size)
        return lambda ops, x, scores: ops.moe(x, scores, bias, experts, spec)

    def run(self, x: np.ndarray, scores: np.ndarray, backend: Backend) -> np.ndarray:
        def build(backend: Backend) -> Callable[[Ops], Tensor]:
            table = backend.packer().pack_table(float_tensor(np.concatenate([x, scores], axis=1)))
            apply = self.apply(backend)

            def forward(ops: Ops) -> Tensor:
                parts = ops.split(ops.embed(table), (x.shape[1], scores.shape[1]))
                return ops.scale(ops.logit_rows(apply(ops, *parts)), 1.0)

            return forward

        return run_rows(build, x, backend)

    def native(self, x: np.ndarray, scores: np.ndarray, num_threads: int = 1) -> np.ndarray:
        return self.run(x, scores, NativeBackend(num_threads))

    def reference(self, x: np.ndarray, scores: np.ndarray) -> np.ndarray:
        return self.run(x, scores, ReferenceBackend("reference", BlasArithmetic()))


def tensors(
    rng: np.random.Generator, kinds: Sequence[TensorKind], width: int = D, inner: int = F
) -> list[tuple[list[CheckpointTensor], CheckpointTensor]]:
    """One expert per kind."""
    return [
        ([random_tensor(kind, (inner, width), rng) for _ in range(2)], random_tensor(kind, (width, inner), rng))
        for kind in kinds
    ]


def rows(rng: np.random.Generator, num_rows: int, num_experts: int, width: int = D) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    return x, (2 * rng.standard_normal((num_rows, num_experts))).astype(np.float32)


SPECS = [
    RoutingSpec(num_experts=8, num_per_token=2),
    RoutingSpec(num_experts=8, num_per_token=2, is_normalised=False, scale=2.5),
    RoutingSpec(num_experts=1, num_per_token=1),
    RoutingSpec(num_experts=5, num_per_token=5, scoring="sigmoid"),
    RoutingSpec(num_experts=40, num_per_token=20, scoring="sigmoid", scale=0.5),  # more than are added up at once
    RoutingSpec(num_experts=8, num_per_token=2, scoring="sigmoid", norm_floor=3.0),
    RoutingSpec(num_experts=12, num_per_token=3, num_groups=4, num_groups_used=2, is_normalised=False),
    RoutingSpec(
        num_experts=256, num_per_token=8, scoring="sigmoid", scale=2.5,
        num_groups=8, num_groups_used=4, num_per_group_score=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("routing", SPECS, ids=lambda spec: f"{spec.num_experts}-{spec.num_per_token}-{spec.scoring}")
def test_routing(rng: np.random.Generator, routing: RoutingSpec, has_bias: bool) -> None:
    x, scores = rows(rng, 23, routing.num_experts, 16)
    bias = rng.standard_normal(routing.num_experts).astype(np.float32) * 0.3 if has_bias else None
    layer = Layer(routing, tensors(rng, [TensorKind.F32] * routing.num_experts, 16, 8), 8, bias)
    expected = layer.reference(x, scores)
    np.testing.assert_allclose(layer.native(x, scores, 2), expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    counts = layer.placed["native"].take_counts()
    assert counts.dtype == np.int64
    assert counts.tolist() == layer.placed["reference"].take_counts().tolist()
    assert counts.sum() == 23 * routing.num_per_token


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lowest_index_is_chosen(rng: np.random.Generator, scoring: Any) -> None:
    routing = RoutingSpec(num_experts=8, num_per_token=3, scoring=scoring, num_groups=4, num_groups_used=2)
    layer = Layer(routing, tensors(rng, [TensorKind.F32] * 8))
    x, _ = rows(rng, 3, 8)
    scores = np.array([[0] * 8, [0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1, 0, 0]], np.float32)
    layer.native(x, scores)
    # groups 0 and 1: experts 0, 1, 2; then 1, 3, 0; groups 2 and 0: 4, 5, 0
    assert layer.placed["native"].take_counts().tolist() == [3, 2, 1, 1, 1, 1, 0, 0]


MIXED = (
    TensorKind.F32, TensorKind.Q8_0, TensorKind.F16, TensorKind.Q4_0, TensorKind.BF16, TensorKind.Q4_1, TensorKind.Q8_0,
    TensorKind.Q5_0,
)  # fmt: skip


@pytest.mark.parametrize("kind", [*dict.fromkeys(MIXED), TensorKind.Q4_K, TensorKind.Q6_K, "mixed"], ids=str)
def test_kinds_of_weights(rng: np.random.Generator, kind: Any) -> None:
    """What an expert computes has the bits of the same layers on their own, whatever the others are made of."""
    kinds = MIXED if kind == "mixed" else (kind,) * 8
    width, inner = (256, 256) if kind in (TensorKind.Q4_K, TensorKind.Q6_K) else (D, 64)
    experts = tensors(rng, kinds, width, inner)
    if kind == "mixed":
        experts[0][0][1] = random_tensor(TensorKind.Q8_0, (inner, width), rng)  # within an expert, too
    layer = Layer(RoutingSpec(num_experts=8, num_per_token=1, is_normalised=False, scoring="sigmoid"), experts, inner)
    x, scores = rows(rng, 41, 8, width)
    scores[:20, 2] = 9  # more than a chunk
    found = layer.native(x, scores, 3)
    for expert, (gate_up, down) in enumerate(experts):
        chosen = scores.argmax(axis=1) == expert
        if not chosen.any():
            continue
        alone = run_rows(_mlp(x[chosen], gate_up, down, inner), x[chosen], NativeBackend(1))
        weights = 1 / (1 + np.exp(-scores[chosen, expert]))
        np.testing.assert_allclose(found[chosen], alone * weights[:, None], rtol=3e-7, atol=1e-30)
    expected = layer.reference(x, scores)
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def _mlp(x: np.ndarray, gate_up: list[Any], down: Any, inner: int) -> Callable[[Backend], Callable[[Ops], Tensor]]:
    def build(backend: Backend) -> Callable[[Ops], Tensor]:
        packer = backend.packer()
        table, first, second = (
            packer.pack_table(float_tensor(x)),
            packer.pack_linear(gate_up),
            packer.pack_linear([down]),
        )

        def forward(ops: Ops) -> Tensor:
            gate, up = ops.split(ops.linear(ops.logit_rows(ops.embed(table)), first), (inner, inner))
            return ops.linear(ops.gated(gate, up, "silu"), second)

        return forward

    return build


@pytest.mark.parametrize("kinds", [(TensorKind.Q4_0,), (TensorKind.Q8_0, TensorKind.BF16)], ids=["q4_0", "mixed"])
def test_bits_do_not_depend_on_batch_threads_or_replicas(rng: np.random.Generator, kinds: tuple[TensorKind]) -> None:
    """Few rows go step by step, many chunk by chunk; 17 do both, by the number of threads."""
    experts = tensors(rng, kinds * (12 // len(kinds)), D, 64)
    routing = RoutingSpec(num_experts=12, num_per_token=3, num_groups=3, num_groups_used=2)
    layer = Layer(routing, experts, 64)
    x, scores = rows(rng, 150, 12)
    scores[:70] += 3 * scores[0]  # so that experts get many rows and few
    expected = layer.native(x, scores)
    slots = rng.permutation([*range(12), 0, 0, 5, 7]).tolist()
    replicated = replace(layer, slots=slots)
    for num_threads in (1, 2, 3):
        assert layer.native(x, scores, num_threads).tobytes() == expected.tobytes()
        assert replicated.native(x, scores, num_threads).tobytes() == expected.tobytes()
        for start, stop in ((0, 1), (1, 3), (0, 45), (60, 77), (100, 150)):
            some = layer.native(x[start:stop], scores[start:stop], num_threads)
            assert some.tobytes() == expected[start:stop].tobytes(), (num_threads, start)


def test_replicas_share_the_tokens_by_position(rng: np.random.Generator) -> None:
    layer = Layer(RoutingSpec(num_experts=2, num_per_token=1), tensors(rng, [TensorKind.F32] * 2), slots=[1, 0, 1, 1])
    x, scores = rows(rng, 8, 2)
    scores[:] = [0, 1]
    layer.native(x, scores)
    experts = layer.placed["native"]
    assert experts.take_counts().tolist() == [3, 0, 3, 2]  # tokens 0, 3, 6; 1, 4, 7; 2, 5
    assert experts.take_counts().tolist() == [0] * 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_row_with_a_bad_score_is_bad_alone(rng: np.random.Generator, scoring: Any, bad: float) -> None:
    layer = Layer(
        RoutingSpec(num_experts=8, num_per_token=2, scoring=scoring), tensors(rng, [TensorKind.Q8_0] * 8, D, 64), 64
    )
    x, scores = rows(rng, 5, 8)
    good = layer.native(x, scores)
    scores[2, 6] = bad
    found = layer.native(x, scores)
    assert np.isnan(found[2]).all()
    others = [0, 1, 3, 4]
    assert found[others].tobytes() == good[others].tobytes()


def test_bad_input_is_bad_alone(rng: np.random.Generator) -> None:
    layer = Layer(RoutingSpec(num_experts=2, num_per_token=2), tensors(rng, [TensorKind.Q4_0] * 2, D, 64), 64)
    x, scores = rows(rng, 5, 2)
    good = layer.native(x, scores)
    x[3, 7] = np.nan
    found = layer.native(x, scores)
    assert np.isnan(found[3]).all()
    assert found[[0, 1, 2, 4]].tobytes() == good[[0, 1, 2, 4]].tobytes()


def test_layers_of_other_shapes_behind_one_another(rng: np.random.Generator) -> None:
    """They share their memory. The last may run on the wanted rows alone, of which there are more than tokens."""
    first = Layer(RoutingSpec(num_experts=8, num_per_token=1), tensors(rng, [TensorKind.F32] * 8))
    second = Layer(RoutingSpec(num_experts=4, num_per_token=3), tensors(rng, [TensorKind.F16] * 4, D, 2 * F), 2 * F)
    x, scores = rows(rng, 9, 8)
    wanted = [8, 0, 3, 3] * 5

    def build(backend: Backend, selects_first: bool = False) -> Callable[[Ops], Tensor]:
        table = backend.packer().pack_table(float_tensor(np.concatenate([x, scores], axis=1)))
        one, two = first.apply(backend), second.apply(backend)

        def forward(ops: Ops) -> Tensor:
            x, scores = ops.split(ops.embed(table), (D, 8))
            fewer, _ = ops.split(scores, (4, 4))
            x = ops.add(x, two(ops, ops.add(x, one(ops, x, scores)), fewer))
            x = ops.add(x, one(ops, x, scores))
            if selects_first:
                x = ops.logit_rows(x)
            x = ops.add(x, two(ops, x, ops.split(x, (4, D - 4))[0]))
            return ops.scale(x if selects_first else ops.logit_rows(x), 1.0)

        return forward

    found = run_rows(build, x, NativeBackend(2), wanted)
    expected = run_rows(build, x, ReferenceBackend("reference", BlasArithmetic()), wanted)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert run_rows(partial(build, selects_first=True), x, NativeBackend(2), wanted).tobytes() == found.tobytes()


def test_experts_change_between_steps(rng: np.random.Generator) -> None:
    """And the table holds what it was given."""
    layer = Layer(RoutingSpec(num_experts=3, num_per_token=2), tensors(rng, [TensorKind.F32] * 3))
    other = replace(layer, experts=layer.experts[::-1], placed={})
    x, scores = rows(rng, 6, 3)
    backend = NativeBackend(2)
    before = layer.run(x, scores, backend)
    model = backend._model
    assert model is not None
    packer = backend.packer()
    packed = [(packer.pack_linear(gate_up), packer.pack_linear([down])) for gate_up, down in other.experts]
    layer.placed["native"].place(np.array([2, 0, 1, 2]), {p: packed[e] for p, e in enumerate([2, 0, 1, 2])})
    assert layer.placed["native"].take_counts().tolist() == [0] * 4
    del packed, packer
    after = backend.run(model, step_of(6)).logits_RV
    assert after.tobytes() == other.native(x, scores).tobytes() != before.tobytes()


def test_counts_are_taken_while_steps_run(rng: np.random.Generator) -> None:
    layer = Layer(RoutingSpec(num_experts=4, num_per_token=2), tensors(rng, [TensorKind.F32] * 4))
    x, scores = rows(rng, 50, 4)
    backend = NativeBackend(2)
    layer.run(x, scores, backend)
    model, experts = backend._model, layer.placed["native"]
    assert model is not None
    per_step = experts.take_counts()
    total, is_over = np.zeros(4, np.int64), threading.Event()

    def take() -> None:
        nonlocal total
        while not is_over.is_set():
            total += experts.take_counts()

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(40):
        backend.run(model, step_of(50))
    is_over.set()
    thread.join()
    total += experts.take_counts()
    assert total.tolist() == (40 * per_step).tolist()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1], "expert 2 has no slot"),
        ([0, 1, 2, 3], "no expert 3"),
        ([0, -1, 1, 2], "no expert -1"),
        ([0, 1, 2], "no slot 3"),
    ],
)
def test_bad_placement_is_refused(rng: np.random.Generator, slots: list[int], message: str) -> None:
    backend = NativeBackend(1)
    packed = [
        (backend.packer().pack_linear(a), backend.packer().pack_linear([b])) for a, b in tensors(rng, [TensorKind.F32])
    ]
    with pytest.raises(ValueError, match=message):
        backend.experts(3).place(np.array(slots), dict.fromkeys(range(4), packed[0]))


def test_experts_of_other_shapes_are_refused(rng: np.random.Generator) -> None:
    backend = NativeBackend(1)
    packer = backend.packer()
    packed = [
        (packer.pack_linear(gate_up), packer.pack_linear([down]))
        for inner in (F, F + 16)
        for gate_up, down in tensors(rng, [TensorKind.F32], D, inner)
    ]
    experts = backend.experts(2)
    with pytest.raises(ValueError, match="slot 1 has another shape"):
        experts.place(np.arange(2), dict(enumerate(packed)))
    routing = RoutingSpec(num_experts=2, num_per_token=1)
    x, scores = rows(rng, 3, 2)
    with pytest.raises(RuntimeError, match="not of the layer's shape"):
        Layer(routing, tensors(rng, [TensorKind.F32] * 2), F + 16).native(x, scores)
    table = packer.pack_table(float_tensor(np.concatenate([x, scores], axis=1)))
    spec = MoeSpec(routing=routing, activation="silu", inner_size=F)

    def forward(ops: Ops) -> Tensor:
        x, scores = ops.split(ops.embed(table), (D, 2))
        return ops.logit_rows(ops.moe(x, scores, None, experts, spec))

    model = OpModel(forward)
    backend.allocate_kv(model.kv_spec, 1, 16)
    with pytest.raises(RuntimeError, match="not placed"):
        backend.run(model, step_of(3))
    experts.place(np.arange(2), {0: packed[0]})
    with pytest.raises(RuntimeError, match="all slots"):
        backend.run(model, step_of(3))


@pytest.mark.parametrize(
    "routing",
    [
        RoutingSpec(num_experts=2, num_per_token=3),
        RoutingSpec(num_experts=4, num_per_token=1, num_groups=3),
        RoutingSpec(num_experts=4, num_per_token=3, num_groups=2),
        RoutingSpec(num_experts=4, num_per_token=1, num_groups=2, num_per_group_score=3),
    ],
)
def test_impossible_routing_is_refused(rng: np.random.Generator, routing: RoutingSpec) -> None:
    x, scores = rows(rng, 3, routing.num_experts)
    layer = Layer(routing, tensors(rng, [TensorKind.F32] * routing.num_experts))
    with pytest.raises(ValueError, match=r"group|fit"):
        layer.native(x, scores)


@pytest.mark.parametrize("width", [1, 16, 40])
def test_gate_rows(rng: np.random.Generator, width: int) -> None:
    x = (rng.standard_normal((9, width + 1)) * 3).astype(np.float32)
    x[:4, -1] = [0, 90, -90, np.nan]

    def build(backend: Backend) -> Callable[[Ops], Tensor]:
        table = backend.packer().pack_table(float_tensor(x))

        def forward(ops: Ops) -> Tensor:
            y, gate = ops.split(ops.embed(table), (width, 1))
            return ops.scale(ops.logit_rows(ops.gate_rows(y, gate)), 1.0)

        return forward

    gate = x[:, -1:].astype(np.float64)
    np.testing.assert_allclose(
        run_rows(build, x, NativeBackend(2)), x[:, :-1] / (1 + np.exp(-gate)), rtol=3e-7, atol=1e-37
    )
