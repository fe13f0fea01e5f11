"""Promise 3 in the compiled kernels: a row's logits have the same bits alone, in any batch, in any chunks and with any
number of threads, on each instruction set. And a row that is not finite changes nothing in the rows beside it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.kernels import create_backend
from headrace.models import LoadedModel, load_model
from headrace.testing.op_models import float_tensor
from headrace.testing.steps import Runner
from headrace.testing.tiny import write_tiny_model

pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
from headrace.kernels.native.backend import NativeBackend

pytestmark = pytest.mark.usefixtures("instruction_set")
VOCAB_SIZE = 272
LENGTHS = (300, *(1, 17, 33, 65, 2, 16, 9) * 9)


@dataclass(frozen=True)
class Variant:
    """A tiny model and how the kernels hold it."""

    architecture: str = "llama"
    quantization: str | None = None
    has_int8_kv: bool = False

    def write(self, folder: Path) -> Path:
        more: dict[str, Any] = {}
        if self.architecture == "gemma3_text":
            more = {
                "sliding_window": 70,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 24,
                "attn_logit_softcapping": 20.0,
                "final_logit_softcapping": 30.0,
            }
        elif self.architecture == "qwen2_moe":
            more = {"shared_expert_intermediate_size": 40}
        return write_tiny_model(
            folder / str(self), architecture=self.architecture, hidden_size=80, head_dim=24, num_heads=6,
            num_kv_heads=2, intermediate_size=144, **more,
        )  # fmt: skip

    def runner(self, path: Path, num_threads: int = 1, num_blocks: int = 700, seed: int = 0) -> Runner:
        backend = NativeBackend(num_threads, self.quantization, self.has_int8_kv)
        return Runner(load_model(path, backend), backend, num_blocks=num_blocks, seed=seed, block_size=16)


VARIANTS = [
    Variant(),
    Variant(quantization="w4", has_int8_kv=True),
    Variant("gemma3_text", "w8"),
    Variant("gemma3_text"),
    Variant("qwen2_moe"),
    Variant("qwen3_moe", "w4"),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    found: Variant = request.param
    return found


@pytest.fixture(scope="module")
def path(variant: Variant, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def sequences() -> dict[int, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, VOCAB_SIZE, length) for name, length in enumerate(LENGTHS)}


def alone(runner: Runner, ids: np.ndarray) -> np.ndarray:
    rows = runner.step({-1: ids})[-1]
    runner.release(-1)
    return rows


def test_kernels_compute_the_model(variant: Variant, path: Path, sequences: dict[int, np.ndarray]) -> None:
    """Bits that are equal but wrong would be worth nothing: near the float32 reference, too."""
    backend = create_backend("reference")
    reference = Runner(load_model(path, backend), backend)
    runner = variant.runner(path)
    limit = {None: 2e-3, "w8": 0.03, "w4": 0.6}[variant.quantization]
    for name in (0, 4):
        expected, found = alone(reference, sequences[name]), alone(runner, sequences[name])
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < limit


def test_in_batches_of_any_size(variant: Variant, path: Path, sequences: dict[int, np.ndarray]) -> None:
    one = variant.runner(path)
    expected = {name: alone(one, ids).tobytes() for name, ids in sequences.items()}
    first = 0
    runner = variant.runner(path, num_threads=2, seed=5)
    for size in (1, 2, 3, 4, 5, 8, 16, 25):
        batch = {name: sequences[name] for name in range(first, first + size)}
        for name, rows in runner.step(batch).items():
            assert rows.tobytes() == expected[name], (size, name)
        first += size
    assert first == len(sequences)
    everything = variant.runner(path, num_threads=3, seed=6).step(sequences)
    assert {name: rows.tobytes() for name, rows in everything.items()} == expected


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_in_any_chunks(variant: Variant, path: Path, sequences: dict[int, np.ndarray], num_threads: int) -> None:
    one = variant.runner(path)
    some = {name: sequences[name] for name in (0, 2, 3, 4, 5, 6, 7)}
    expected = {name: alone(one, ids) for name, ids in some.items()}
    rng = np.random.default_rng(num_threads)
    runner = variant.runner(path, num_threads, seed=num_threads)
    done = dict.fromkeys(some, 0)
    while left := [name for name in some if done[name] < len(some[name])]:
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
        chunks = {n: some[n][done[n] : done[n] + int(rng.choice([1, 2, 5, 16, 31, 100]))] for n in chosen}
        for name, rows in runner.step(chunks).items():
            want = expected[name][done[name] : done[name] + len(rows)]
            assert rows.tobytes() == want.tobytes(), (name, done[name], len(rows))
            done[name] += len(rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_row_shows_and_harms_nobody(variant: Variant, path: Path, bad: float) -> None:
    """Token 7 has a number in its embedding that is not finite: every logit row from there on must tell."""
    runner = variant.runner(path, num_threads=2)
    table = np.random.default_rng(2).standard_normal((VOCAB_SIZE, 80)).astype(np.float32)
    runner.model = with_table(runner.model, runner, table)
    rng = np.random.default_rng(3)
    sequences = {name: rng.integers(8, VOCAB_SIZE, length) for name, length in enumerate((9, 40, 3, 20))}
    good = runner.step(sequences)
    sequences[1][25] = 7
    table[7, 33] = bad
    broken = variant.runner(path, num_threads=2, seed=1)
    broken.model = with_table(broken.model, broken, table)
    found = broken.step(sequences)
    for name in (0, 2, 3):
        assert found[name].tobytes() == good[name].tobytes()
    assert found[1][:25].tobytes() == good[1][:25].tobytes()
    assert not np.isfinite(found[1][25:]).any(), "all logits, of all rows that attend to the bad one"
    later = broken.step({0: rng.integers(8, VOCAB_SIZE, 5), 1: [9]})
    assert not np.isfinite(later[1]).all()
    assert np.isfinite(later[0]).all()


def with_table(model: LoadedModel, runner: Runner, table: np.ndarray) -> LoadedModel:
    decoder: Any = model.decoder
    return dataclasses.replace(
        model, decoder=dataclasses.replace(decoder, embed=runner.backend.packer().pack_table(float_tensor(table)))
    )
