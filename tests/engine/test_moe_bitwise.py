"""Promise 3 on models with experts: the same bits alone, in a batch, in chunks, after a prefix hit and a preemption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.testing.bits import Bits, Case, CoreRun, bits
from headrace.testing.tiny import write_tiny_model
from headrace.types import SamplingParams


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared expert with a gate, and a load that differs from expert to expert."""
    folder = tmp_path_factory.mktemp("tiny") / "moe"
    return write_tiny_model(
        folder,
        architecture="qwen2_moe",
        num_experts=8,
        num_experts_per_token=3,
        router_skew=1.0,
        shared_expert_intermediate_size=20,
    )


def start(model: Path, **options: int | bool) -> CoreRun:
    executor = UniprocExecutor(model, create_backend("reference-exact"))
    return CoreRun(executor, block_size=4, **options)  # type: ignore[arg-type]  # what CoreRun takes


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(5)
    params = [
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, logprobs=0, max_tokens=8, ignore_eos=True, seed=7),
        SamplingParams(temperature=1.2, prompt_logprobs=1, logprobs=1, max_tokens=8, seed=8),
    ]
    return [
        Case(tuple(rng.randrange(256) for _ in range(length)), params[i % 3])
        for i, length in enumerate([1, 3, 9, 17, 24, 30, 5, 12])
    ]


@pytest.fixture(scope="module")
def alone(moe_model: Path, cases: list[Case]) -> list[list[Bits]]:
    return [bits(start(moe_model, prefix_cache=False).run([case]))[0] for case in cases]


def test_in_a_batch_and_after_a_prefix_hit(moe_model: Path, cases: list[Case], alone: list[list[Bits]]) -> None:
    assert len({str(choices) for choices in alone}) == len(cases)
    engine = start(moe_model)
    assert bits(engine.run(cases)) == alone
    second = engine.run(cases)
    assert any(choices[0].num_cached_tokens for choices in second)
    assert bits(second) == alone


@pytest.mark.parametrize("chunk", [3, 16])
def test_in_chunks(moe_model: Path, cases: list[Case], alone: list[list[Bits]], chunk: int) -> None:
    assert bits(start(moe_model, chunk=chunk).run(cases)) == alone


def test_after_preemption(moe_model: Path, cases: list[Case], alone: list[list[Bits]]) -> None:
    engine = start(moe_model, num_blocks=20)
    assert bits(engine.run(cases)) == alone
    assert engine.core.stats().num_preemptions > 0, "the blocks must run out for this test to say anything"
