"""Embeddings are the model's last hidden state as transformers has it, and bitwise the same alone, beside sequences
that generate, in chunks, after a prefix hit, after preemption, and on several ranks.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM
from headrace.config.options import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.executor.uniproc import UniprocExecutor
from headrace.kernels import create_backend, has_native
from headrace.testing.bits import Answer, Case, CoreRun, bits
from headrace.transport.messages import Submit
from headrace.types import POOLINGS, FinishReason, RequestId, SamplingParams

BACKENDS = ("reference-exact", *(("native",) if has_native() else ()))
BLOCK_SIZE = 16
MANY_BLOCKS = 100


def make_cases(seed: int = 3) -> list[Case]:
    """Eight embeddings of prompts that begin alike, among four sequences that generate."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(20)]
    cases = []
    for number in range(12):
        prompt = (*shared, *(rng.randrange(256) for _ in range(rng.randrange(1, 60))))
        params = SamplingParams(pooling=POOLINGS[number % 2])
        if number % 3 == 0:
            params = SamplingParams(max_tokens=30, ignore_eos=True, seed=number, logprobs=1)
        cases.append(Case(prompt, params))
    cases.append(Case((65,), SamplingParams(pooling="mean")))
    return cases


def run(model: Path, backend: str, **options: int) -> CoreRun:
    executor = UniprocExecutor(model, create_backend(backend))
    return CoreRun(executor, block_size=BLOCK_SIZE, **({"num_blocks": MANY_BLOCKS, "prefix_cache": False} | options))


@pytest.fixture(scope="module", params=BACKENDS)
def alone(request: pytest.FixtureRequest, tiny_model: Path) -> tuple[str, list[list[tuple[object, ...]]]]:
    """The backend, and each case in one piece, with nothing cached and nobody beside it."""
    engine = run(tiny_model, request.param)
    return request.param, [bits(engine.run([case]))[0] for case in make_cases()]


def pooled(answers: list[list[Answer]]) -> list[tuple[Case, Answer]]:
    pairs = [(case, choices[0]) for case, choices in zip(make_cases(), answers, strict=True)]
    return [(case, answer) for case, answer in pairs if case.params.pooling is not None]


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_it_is_the_last_hidden_state_of_transformers(tiny_model: Path, backend: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    answers = run(tiny_model, backend).run(make_cases())
    for case, answer in pooled(answers):
        with torch.no_grad():
            states = theirs(torch.tensor([case.prompt]), use_cache=False).last_hidden_state[0].numpy()
        expected = states[-1] if case.params.pooling == "last" else states.mean(axis=0)
        assert answer.embedding is not None
        found = np.frombuffer(answer.embedding, np.float32)
        np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max(), rtol=0)
        assert (answer.finish, answer.token_ids) == (FinishReason.STOP, [])


@pytest.mark.parametrize("chunk", [512, 64, 7])
def test_in_a_batch_and_in_chunks(
    tiny_model: Path, alone: tuple[str, list[list[tuple[object, ...]]]], chunk: int
) -> None:
    backend, expected = alone
    assert bits(run(tiny_model, backend, chunk=chunk).run(make_cases())) == expected


def test_after_a_prefix_hit(tiny_model: Path, alone: tuple[str, list[list[tuple[object, ...]]]]) -> None:
    backend, expected = alone
    engine = run(tiny_model, backend, prefix_cache=True)
    engine.run(make_cases())
    answers = engine.run(make_cases())
    assert bits(answers) == expected
    for case, answer in pooled(answers):
        is_found = case.params.pooling == "last" and len(case.prompt) > BLOCK_SIZE
        assert bool(answer.num_cached_tokens) is is_found, "a mean needs every token"


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_preemption(tiny_model: Path, backend: str, pooling: str) -> None:
    """Two sequences outgrow the memory while the prompt behind them is computed, a token a step."""
    writers = [Case((5, each), SamplingParams(max_tokens=60, ignore_eos=True, seed=1)) for each in (6, 7)]
    case = Case(tuple(range(70)), SamplingParams(pooling=pooling))
    expected = run(tiny_model, backend).run([case])[0][0]
    answer = run(tiny_model, backend, chunk=3, num_blocks=9).run([*writers, case])[2][0]
    assert answer.num_preemptions > 0, "it must have been begun twice"
    assert answer.embedding == expected.embedding


def test_a_prompt_may_fill_the_context(tiny_model: Path) -> None:
    executor = UniprocExecutor(tiny_model, create_backend("reference"))
    core = EngineCore(executor, CacheConfig(num_kv_blocks=4), SchedulerConfig(), max_model_len=40)
    for length, finish in ((40, FinishReason.STOP), (41, FinishReason.ERROR)):
        params = SamplingParams(pooling="last")
        core.submit(0, Submit(request_id=RequestId(length), public_id="a", prompts=((65,) * length,), params=params))
        (outputs,) = core.step().values()
        assert outputs.finished == [finish]
    for fields in ({"n": 2}, {"prompt_logprobs": 1}, {"pooling": "cls"}):
        params = SamplingParams(**({"pooling": "mean"} | fields))  # type: ignore[arg-type]
        core.submit(0, Submit(request_id=RequestId(1), public_id="a", prompts=((65,),), params=params))
        (outputs,) = core.take_outputs().values()
        assert outputs.details[0].error is not None
        assert outputs.details[0].error.param == next(iter(fields))
    assert not core.has_work


def test_offline(tiny_model: Path) -> None:
    with LLM(str(tiny_model), backend="reference", pooling="mean", max_model_len=64, kv_cache_memory="4MiB") as llm:
        first, second, third = llm.embed(["one", "two", [111, 110, 101]])
        assert (first.prompt, third.prompt, third.prompt_token_ids) == ("one", None, [111, 110, 101])
        assert first.embedding.dtype == np.float32
        assert first.embedding.shape == (llm.info.embedding_size,)
        np.testing.assert_allclose(first.embedding, third.embedding, atol=1e-6)
        assert not np.allclose(first.embedding, second.embedding, atol=1e-2)
        (raw,) = llm.embed("one", normalize=False)
        np.testing.assert_allclose(raw.embedding / np.linalg.norm(raw.embedding), first.embedding, atol=1e-6)
        (last,) = llm.embed("one", pooling="last", dimensions=5)
        assert np.linalg.norm(last.embedding) == pytest.approx(1)
        assert last.embedding.shape == (5,)
        (cut,) = llm.embed("x" * 70 + "one", truncate_prompt_tokens=3)
        assert cut.prompt_token_ids == [111, 110, 101]
        with pytest.raises(ContextLengthExceeded, match="At most 64"):
            llm.embed("x" * 65)
        with pytest.raises(InvalidRequest, match="dimensions"):
            llm.embed("x", dimensions=1000)


@pytest.mark.skipif(not has_native(), reason="the compiled kernels are not there")
def test_on_two_ranks(tiny_model: Path) -> None:
    from headrace.testing.ranks import RankRig

    found = []
    for size in (1, 2):
        rig = RankRig(tiny_model, size)
        try:
            cases = [case for case in make_cases() if case.params.pooling is not None]
            requests = [rig.submit(list(case.prompt), pooling=case.params.pooling) for case in cases]
            rig.submit([65, 66], max_tokens=5)
            rig.run()
            found.append([rig.choice(request).details[-1].embedding for request in requests])
        finally:
            rig.close()
    assert found[0][0]
    assert found[0] == found[1]
