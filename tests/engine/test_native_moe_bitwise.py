"""Promise 3 on a model with experts in the compiled kernels: the same bits alone, in a batch, in chunks, after a prefix
hit, after a preemption and with any number of threads. And near what numpy computes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend, has_native
from headrace.testing.bits import Bits, Case, CoreRun, bits
from headrace.testing.tiny import write_tiny_model
from headrace.types import LogprobRows, SamplingParams

pytestmark = pytest.mark.skipif(not has_native(), reason="the compiled kernels are not there")
LENGTHS = (1, 40, 9, 17, 70, 33, 5, 30, 16, 2, 52, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared expert with a gate, and a few experts that get most of the tokens."""
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "moe",
        architecture="qwen2_moe",
        num_experts=12,
        num_experts_per_token=3,
        expert_size=40,
        router_skew=2.0,
        shared_expert_intermediate_size=20,
    )


def start(model: Path, backend: Any, **options: int | bool) -> CoreRun:
    return CoreRun(UniprocExecutor(model, backend), block_size=16, **options)  # type: ignore[arg-type]  # CoreRun's


def native(num_threads: int = 2) -> Any:
    return create_backend("native", num_threads=num_threads, quantization="w4")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(5)
    params = [
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, logprobs=0, max_tokens=20, ignore_eos=True, seed=7),
        SamplingParams(temperature=1.2, prompt_logprobs=1, logprobs=1, max_tokens=20, seed=8),
    ]
    return [
        Case(tuple(rng.randrange(256) for _ in range(length)), params[i % 3]) for i, length in enumerate(LENGTHS * 2)
    ]


@pytest.fixture(scope="module")
def alone(model: Path, cases: list[Case]) -> list[list[Bits]]:
    engine = start(model, native(1), prefix_cache=False)
    return [bits(engine.run([case]))[0] for case in cases]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_in_a_batch_and_after_a_prefix_hit(
    model: Path, cases: list[Case], alone: list[list[Bits]], num_threads: int
) -> None:
    assert len({str(choices) for choices in alone}) == len(cases)
    engine = start(model, native(num_threads))
    assert bits(engine.run(cases)) == alone
    second = engine.run(cases)
    assert any(choices[0].num_cached_tokens for choices in second)
    assert bits(second) == alone


@pytest.mark.parametrize("chunk", [3, 31])
def test_in_chunks(model: Path, cases: list[Case], alone: list[list[Bits]], chunk: int) -> None:
    assert bits(start(model, native(), chunk=chunk).run(cases)) == alone


def test_after_preemption(model: Path, cases: list[Case], alone: list[list[Bits]]) -> None:
    engine = start(model, native(), num_blocks=12)
    assert bits(engine.run(cases)) == alone
    assert engine.core.stats().num_preemptions > 0, "the blocks must run out for this test to say anything"


def test_against_numpy(model: Path, cases: list[Case]) -> None:
    """Log probabilities of the prompts, with weights as they are in the file."""
    with_prompts = [case for case in cases if case.params.prompt_logprobs]
    found, expected = (start(model, create_backend(name)).run(with_prompts) for name in ("native", "reference"))
    for ours, theirs in zip(found, expected, strict=True):
        a, b = ours[0].prompt_logprobs, theirs[0].prompt_logprobs
        assert isinstance(a, LogprobRows)
        assert isinstance(b, LogprobRows)
        ours_by_row, theirs_by_row = (np.frombuffer(each.logprobs, np.float32) for each in (a, b))
        np.testing.assert_allclose(ours_by_row, theirs_by_row, rtol=0, atol=5e-3)
