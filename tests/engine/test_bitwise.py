"""Promise 3: same request, same bits. Tokens and log probabilities of the real engine on a tiny model with the ordered
reference kernels are bitwise equal alone, in a batch, with any chunk size, after a prefix hit and after preemption.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend
from headrace.testing.bits import Case, CoreRun, bits
from headrace.types import LogprobRows, SamplingParams

MAX_TOKENS = 10

VARIED_PARAMS = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logprobs=1),
    SamplingParams(temperature=1.3, prompt_logprobs=2, logprobs=-1),
    SamplingParams(
        temperature=0.9, logit_bias={65: 3.0}, min_tokens=4, bad_words_token_ids=((66, 67),), n=2, logprobs=1
    ),
]


def make_case(rng: random.Random, prompt_len: int, kind: int) -> Case:
    params = VARIED_PARAMS[kind % len(VARIED_PARAMS)]
    prompt = tuple(rng.randrange(256) for _ in range(prompt_len))
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return Case(prompt, SamplingParams(**(fields | {"seed": rng.randrange(2**40), "max_tokens": MAX_TOKENS})))


class Engine(CoreRun):
    """On the tiny model with the ordered kernels."""

    def __init__(self, model: Path, *, chunk: int = 512, num_blocks: int = 400, prefix_cache: bool = True) -> None:
        executor = UniprocExecutor(model, create_backend("reference-exact"))
        super().__init__(executor, block_size=4, chunk=chunk, num_blocks=num_blocks, prefix_cache=prefix_cache)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    rng = random.Random(11)
    return [make_case(rng, rng.choice([1, 3, 4, 9, 17, 40]), kind) for kind in range(16)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, cases: list[Case]) -> list[list[tuple[object, ...]]]:
    """Each case in an engine of its own: whole prefill, no cache, nobody beside it."""
    return [bits(Engine(tiny_model, prefix_cache=False).run([case]))[0] for case in cases]


def test_answers_are_worth_comparing(cases: list[Case], alone: list[list[tuple[object, ...]]]) -> None:
    texts = [choice[0] for choices in alone for choice in choices]
    assert len(set(texts)) > 12, "the tiny model's outputs vary"
    for case, choices in zip(cases, alone, strict=True):
        for token_ids, logprobs, prompt_logprobs, _ in choices:
            assert isinstance(token_ids, tuple)
            if case.params.logprobs is not None:
                assert isinstance(logprobs, LogprobRows)
                assert logprobs.num_rows == len(token_ids)
            if case.params.prompt_logprobs is not None and len(case.prompt) > 1:
                assert isinstance(prompt_logprobs, LogprobRows)
                assert prompt_logprobs.num_rows == len(case.prompt) - 1


def test_in_a_batch_of_sixteen(tiny_model: Path, cases: list[Case], alone: list[list[tuple[object, ...]]]) -> None:
    assert bits(Engine(tiny_model).run(cases)) == alone


@pytest.mark.parametrize("chunk", [1, 2, 7, 33])
def test_with_any_chunk_size(
    tiny_model: Path, cases: list[Case], alone: list[list[tuple[object, ...]]], chunk: int
) -> None:
    some = slice(0, 6 if chunk < 7 else 16)
    assert bits(Engine(tiny_model, chunk=chunk).run(cases[some])) == alone[some]


def test_after_a_prefix_hit(tiny_model: Path, cases: list[Case], alone: list[list[tuple[object, ...]]]) -> None:
    engine = Engine(tiny_model)
    first, second = engine.run(cases), engine.run(cases)
    hits = [
        choices[0].num_cached_tokens
        for case, choices in zip(cases, second, strict=True)
        if len(case.prompt) > 4 and case.params.prompt_logprobs is None
    ]
    assert hits
    assert all(hits), "the second run must find its prompts cached"
    assert bits(first) == alone
    assert bits(second) == alone


def test_after_preemption(tiny_model: Path, cases: list[Case], alone: list[list[tuple[object, ...]]]) -> None:
    for prefix_cache in (False, True):
        engine = Engine(tiny_model, num_blocks=26, prefix_cache=prefix_cache)
        answers = engine.run(cases)
        assert engine.core.stats().num_preemptions > 0, "the blocks must run out for this test to say anything"
        assert bits(answers) == alone


@given(
    seed=st.integers(0, 2**32),
    chunk=st.sampled_from([512, 1, 3, 8, 21]),
    num_blocks=st.integers(14, 60),
    prefix_cache=st.booleans(),
    num_cases=st.integers(1, 6),
)
@settings(max_examples=12, deadline=None)
def test_whatever_happens_around_it(
    tiny_model: Path, seed: int, chunk: int, num_blocks: int, prefix_cache: bool, num_cases: int
) -> None:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(256) for _ in range(12))
    drawn = []
    for _ in range(num_cases):
        case = make_case(rng, rng.randint(1, 20), rng.randrange(len(VARIED_PARAMS)))
        drawn.append(Case(shared[: rng.choice([0, 8, 12])] + case.prompt, case.params))
    engine = Engine(tiny_model, chunk=chunk, num_blocks=num_blocks, prefix_cache=prefix_cache)
    answers = []
    for case in drawn:  # they arrive at different moments
        answers.append(engine.submit(case))
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.finish()
    expected = [bits(Engine(tiny_model, prefix_cache=False).run([case]))[0] for case in drawn]
    assert bits(answers) == expected
