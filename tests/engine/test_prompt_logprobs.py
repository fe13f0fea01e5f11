"""Log probabilities of prompts are those of a cold run in one piece, whatever the engine does meanwhile: prompts that
are cached, prefill in small chunks among other sequences, and preemption with part of the rows delivered.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.testing.bits import Case, CoreRun
from headrace.types import LogprobRows, SamplingParams

NUM_CASES = 6
BLOCK_SIZES = {"reference-exact": 4, "native": 16}  # by backend
FEW, MANY = 112, 1600  # tokens of KV memory


def make_cases(prompt_logprobs: int | None = 2) -> list[Case]:
    """Prompts of 20 to 60 tokens of which all begin the same; half of them want `n` choices."""
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(18)]
    cases = []
    for number in range(NUM_CASES):
        prompt = (*shared, *(rng.randrange(256) for _ in range(rng.randrange(2, 42))))
        wish = prompt_logprobs if prompt_logprobs is None or number % 4 else -1
        params = SamplingParams(
            n=1 + number % 2, seed=number, max_tokens=20, ignore_eos=True, prompt_logprobs=wish, logprobs=1
        )
        cases.append(Case(prompt, params))
    return cases


def run(model: Path, backend: str, *, chunk: int, kv_tokens: int, prefix_cache: bool) -> CoreRun:
    executor = UniprocExecutor(model, create_backend(backend))
    size = BLOCK_SIZES[backend]
    return CoreRun(executor, block_size=size, chunk=chunk, num_blocks=kv_tokens // size, prefix_cache=prefix_cache)


@pytest.fixture(scope="module", params=list(BLOCK_SIZES))
def cold(request: pytest.FixtureRequest, tiny_model: Path) -> tuple[str, list[LogprobRows | None]]:
    """The backend, and each case's rows from an engine of its own: one piece, no cache, nobody beside it."""
    backend = request.param
    rows = []
    for case in make_cases():
        engine = run(tiny_model, backend, chunk=512, kv_tokens=MANY, prefix_cache=False)
        rows.append(engine.run([case])[0][0].prompt_logprobs)
    return backend, rows


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("kv_tokens", [FEW, MANY])
def test_they_equal_a_cold_run_with_everything_on(
    tiny_model: Path, cold: tuple[str, list[LogprobRows | None]], chunk: int, kv_tokens: int
) -> None:
    backend, expected = cold
    engine = run(tiny_model, backend, chunk=chunk, kv_tokens=kv_tokens, prefix_cache=True)
    engine.run(make_cases(None))  # leaves its prompts in the cache
    before = engine.core.stats()
    for _ in range(2):
        answers = engine.run(make_cases())
        for case, choices, rows in zip(make_cases(), answers, expected, strict=True):
            assert rows is not None
            assert rows.num_rows == len(case.prompt) - 1
            assert [choice.prompt_logprobs for choice in choices] == [rows] * case.params.n
    stats = engine.core.stats()
    assert before.prefix_hits > 0, "the prompts must have been cached for this to say anything"
    if kv_tokens == FEW:
        assert stats.num_preemptions > before.num_preemptions, "the blocks must run out"
