"""Experts spread over ranks, whole or cut: every rank ends with the bits of one that has them all.

The ranks are threads here, over memory that they map as processes would.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headrace.kernels.ops import MoeSpec, Ops, RoutingSpec, Tensor
from headrace.testing.op_models import OpModel, float_tensor, random_tensor, step_of
from headrace.weights.tensor import CheckpointTensor, TensorKind

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native import _native
from headrace.kernels.native.backend import NativeBackend

D, F, E, NUM_LAYERS = 64, 96, 6, 3
NUM_TOKENS = 70
ROUTING = RoutingSpec(num_experts=E, num_per_token=2)


@dataclass(frozen=True)
class Spread:
    """How experts are spread: whole, by the slots of each rank, or cut, by the sizes of each rank's parts."""

    slots: Sequence[Sequence[int]] = ()
    inner_sizes: tuple[int, ...] = ()
    output_sizes: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.slots or self.inner_sizes)


ALONE = Spread(slots=(range(E),))
SPREADS = {
    "whole": Spread(slots=((0, 1, 2), (3, 4, 5))),
    "replicas": Spread(slots=((0, 5, 1, 2), (3, 0, 4, 5), (2, 2, 2, 1))),
    "cut": Spread(inner_sizes=(48, 48), output_sizes=(32, 32)),
    "cut unevenly": Spread(inner_sizes=(16, 48, 32), output_sizes=(37, 1, 26)),
}


@dataclass(frozen=True)
class Weights:
    """Layers of experts: gate and up, down."""

    layers: list[list[tuple[list[CheckpointTensor], CheckpointTensor]]]
    x: np.ndarray

    def model(self, backend: NativeBackend, spread: Spread, rank: int) -> tuple[OpModel, list[Any]]:
        """The model, and the experts of each layer."""
        packer = backend.packer()
        table = packer.pack_table(float_tensor(self.x))
        placed = []
        for layer in self.layers:
            experts = backend.experts(E)
            if spread.slots:
                slots = [expert for of_rank in spread.slots for expert in of_rank]
                first = sum(map(len, spread.slots[:rank]))
                held = dict(enumerate(spread.slots[rank], first))
            else:
                slots = list(range(E))
                held = dict(enumerate(slots))
            inner, outputs = _part(spread.inner_sizes, rank, F), _part(spread.output_sizes, rank, D)
            packed = {
                slot: (
                    packer.pack_linear([part.rows(inner) for part in layer[expert][0]]),
                    packer.pack_linear([layer[expert][1].rows(outputs)]),
                )
                for slot, expert in held.items()
            }
            experts.place(np.array(slots), packed)
            placed.append(experts)
        spec = MoeSpec(
            routing=ROUTING,
            activation="silu",
            inner_size=F,
            inner_sizes=spread.inner_sizes,
            output_sizes=spread.output_sizes,
        )

        def forward(ops: Ops) -> Tensor:
            x, *scores = ops.split(ops.embed(table), (D, *[E] * NUM_LAYERS))
            for experts, of_layer in zip(placed, scores, strict=True):
                x = ops.add(x, ops.moe(x, of_layer, None, experts, spec))
            x = ops.logit_rows(x)
            sizes = (D - spread.size + 1, *[1] * (spread.size - 1))
            return ops.gather(ops.scale(ops.split(x, sizes)[rank], 1.0), sizes)

        return OpModel(forward), placed


def _part(sizes: tuple[int, ...], rank: int, total: int) -> range:
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1])) if sizes else range(total)


@pytest.fixture(scope="module", params=[(TensorKind.Q8_0,), (TensorKind.F16, TensorKind.Q4_0)], ids=["q8_0", "mixed"])
def weights(request: pytest.FixtureRequest) -> Weights:
    rng = np.random.default_rng(7)
    kinds = request.param * (E // len(request.param))

    def expert(kind: TensorKind) -> Any:
        return [random_tensor(kind, (F, D), rng) for _ in range(2)], random_tensor(kind, (D, F), rng)

    x = rng.standard_normal((NUM_TOKENS, D + NUM_LAYERS * E)).astype(np.float32)
    return Weights([[expert(kind) for kind in kinds] for _ in range(NUM_LAYERS)], x)


@pytest.fixture
def memory() -> Iterator[int]:
    """A file that the ranks map."""
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, _native.Group.num_bytes)
    yield descriptor
    os.close(descriptor)


STEPS = (1, NUM_TOKENS, 3, 33, 2)


def run(weights: Weights, spread: Spread, rank: int, group: Any, num_threads: int) -> tuple[list[bytes], list[Any]]:
    """The logits of steps of several sizes, and the tokens of each layer's slots."""
    backend = NativeBackend(num_threads, group=group)
    model, experts = weights.model(backend, spread, rank)
    backend.allocate_kv(model.kv_spec, -(-NUM_TOKENS // 16), 16)
    results = []
    for num_tokens in STEPS:
        logits = backend.run(model, step_of(num_tokens)).logits_RV
        results.append(logits.tobytes())
        if group is not None:
            group.barrier()  # the others read the same logits before they are written again
    return results, [layer.take_counts().tolist() for layer in experts]


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * size

    def run_rank(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("name", SPREADS)
def test_ranks_together_have_the_bits_of_one(weights: Weights, name: str, memory: int) -> None:
    spread = SPREADS[name]
    expected, counts = run(weights, ALONE, 0, None, 1)
    groups = [_native.Group(memory, rank, spread.size) for rank in range(spread.size)]
    results = in_threads(spread.size, lambda rank: run(weights, spread, rank, groups[rank], 1 + rank % 2))
    for found, _ in results:
        assert found == expected
    slots = [expert for of_rank in spread.slots for expert in of_rank] or list(range(E))
    for _, of_slots in results:
        assert of_slots == results[0][1]
        by_expert = [np.bincount(slots, of_layer, E).tolist() for of_layer in of_slots]
        assert by_expert == counts


def test_parts_must_add_up(weights: Weights, memory: int) -> None:
    backend = NativeBackend(1, group=_native.Group(memory, 0, 2))
    for spread, message in (
        (Spread(inner_sizes=(48, 32), output_sizes=(32, 32)), "add up"),
        (Spread(inner_sizes=(48, 48)), "both of their products"),
    ):
        model, _ = weights.model(backend, spread, 0)
        backend.allocate_kv(model.kv_spec, 1, 16)
        with pytest.raises(ValueError, match=message):
            backend.run(model, step_of(2))
