"""Promise 3 on SmolLM2 itself with the compiled kernels: tokens and log probabilities of a request are bitwise equal
alone, in batches of up to 64, with any chunk size, with 1 or 2 threads, after a prefix hit and after preemption.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend, has_native
from headrace.testing.bits import Bits, Case, CoreRun, bits
from headrace.types import POOLINGS, LogprobRows, SamplingParams

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not has_native(), reason="the compiled kernels are not there"),
]
MAX_TOKENS = 4
NUM_COMPARED = 16  # of 64
PROMPT_LENGTHS = (1, 15, 40, 15, 17, 3, 33, 15)
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, logprobs=0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.3, prompt_logprobs=1, logprobs=1),
]


class Engine:
    """Makes one core after the other over the same loaded weights, each with new KV memory."""

    def __init__(self, model: Path, num_threads: int, kv_cache_dtype: str = "auto") -> None:
        backend = create_backend("native", num_threads=num_threads, kv_cache_dtype=kv_cache_dtype)
        self.executor = UniprocExecutor(model, backend)

    def new(self, *, chunk: int = 512, num_blocks: int = 600, prefix_cache: bool = False) -> CoreRun:
        self.executor.close()
        return CoreRun(
            self.executor, block_size=16, chunk=chunk, num_blocks=num_blocks, max_num_seqs=64, prefix_cache=prefix_cache
        )


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    return Engine(smollm2, 2)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(7)
    made = []
    for index in range(64):
        prompt = tuple(rng.randrange(49152) for _ in range(PROMPT_LENGTHS[index % 8]))
        params = PARAMS[index * 5 // 8 % len(PARAMS)]
        fields = {name: getattr(params, name) for name in params.__struct_fields__}
        fields |= {"seed": rng.randrange(2**40), "max_tokens": MAX_TOKENS, "ignore_eos": True}
        made.append(Case(prompt, SamplingParams(**fields)))
    return made


@pytest.fixture(scope="module")
def alone(engine: Engine, cases: list[Case]) -> list[list[Bits]]:
    """Each case by itself: whole prefill, nothing cached, nobody beside it."""
    core = engine.new()
    return [bits(core.run([case]))[0] for case in cases[:NUM_COMPARED]]


def test_answers_are_worth_comparing(alone: list[list[Bits]]) -> None:
    assert len({choices[0][0] for choices in alone}) > NUM_COMPARED * 3 / 4, "outputs vary"
    for choices in alone:
        token_ids, logprobs = choices[0][:2]
        assert isinstance(token_ids, tuple)
        assert isinstance(logprobs, LogprobRows)
        assert len(token_ids) == logprobs.num_rows == MAX_TOKENS


@pytest.mark.parametrize("size", [2, 5, 16, 64])
def test_in_batches(engine: Engine, cases: list[Case], alone: list[list[Bits]], size: int) -> None:
    some = slice(NUM_COMPARED - min(size, NUM_COMPARED), NUM_COMPARED)
    others = cases[NUM_COMPARED:] if size > NUM_COMPARED else []
    found = bits(engine.new().run(cases[some] + others))
    assert len(found) == size
    assert found[: some.stop - some.start] == alone[some]


@pytest.mark.parametrize("chunk", [3, 7, 50])
def test_with_any_chunk_size(engine: Engine, cases: list[Case], alone: list[list[Bits]], chunk: int) -> None:
    some = slice(2, 6 if chunk == 3 else 16)
    assert bits(engine.new(chunk=chunk).run(cases[some])) == alone[some]


def test_with_one_thread(smollm2: Path, cases: list[Case], alone: list[list[Bits]]) -> None:
    some = slice(2, 10)
    assert bits(Engine(smollm2, 1).new().run(cases[some])) == alone[some]


def test_after_a_prefix_hit(engine: Engine, cases: list[Case], alone: list[list[Bits]]) -> None:
    some = slice(0, 16)
    core = engine.new(prefix_cache=True)
    first, second = core.run(cases[some]), core.run(cases[some])
    hits = [
        choices[0].num_cached_tokens
        for case, choices in zip(cases[some], second, strict=True)
        if len(case.prompt) > 16 and case.params.prompt_logprobs is None
    ]
    assert hits
    assert all(hits), "the second run must find its prompts cached"
    assert bits(first) == alone[some]
    assert bits(second) == alone[some]


def test_after_preemption(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, logprobs=1, seed=3, max_tokens=34, ignore_eos=True)
    some = [Case((5, 300, 7000), params), Case((9, 8), params)]  # they outgrow two blocks each
    core = engine.new()
    by_itself = [bits(core.run([case]))[0] for case in some]
    core = engine.new(num_blocks=4)
    answers = core.run(some)
    assert core.core.stats().num_preemptions > 0, "the blocks must run out for this test to say anything"
    assert bits(answers) == by_itself


def test_with_int8_kv(smollm2: Path, cases: list[Case], alone: list[list[Bits]]) -> None:
    engine = Engine(smollm2, 2, "int8")
    some = cases[:8]
    core = engine.new()
    by_itself = [bits(core.run([case]))[0] for case in some]
    assert by_itself != alone[:8], "other memory, other numbers"
    assert bits(engine.new(chunk=9).run(some)) == by_itself
    assert bits(engine.new(num_blocks=8).run(some)) == by_itself


def test_embeddings(engine: Engine, cases: list[Case]) -> None:
    some = [Case(case.prompt, SamplingParams(pooling=POOLINGS[i % 2])) for i, case in enumerate(cases[2:8])]
    core = engine.new()
    by_itself = [bits(core.run([case]))[0] for case in some]
    assert len({choices[0] for choices in by_itself}) == len(some)
    others = cases[8:11]
    assert bits(engine.new(chunk=9).run([*others, *some]))[len(others) :] == by_itself
    core = engine.new(prefix_cache=True)
    assert bits(core.run(some)) == bits(core.run(some)) == by_itself
