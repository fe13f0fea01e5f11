"""The runner over a backend whose logits reveal any wrong token, position, slot or block: equal to a dense loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runner import logprobs, model_runner, sampler
from headrace.types import SamplingParams

PROMPT = [5, 9, 2, 7, 7, 3, 11, 20, 4]
Driver = Any
History = Callable[[np.ndarray], np.ndarray]

MANY_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_k=8, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.2, logprobs=3, min_tokens=5, stop_token_ids=(8,)),
    SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0, bad_words_token_ids=((4,), (6, 7))),
    SamplingParams(temperature=1.0, prompt_logprobs=-1, logit_bias={3: 4.0}),
]


def alone(make_driver: Callable[..., Driver], prompt: list[int], params: SamplingParams, seed: int, n: int) -> Any:
    driver = make_driver()
    sequence = driver.add(prompt, params, seed)
    driver.generate(n)
    return sequence


def same(a: Any, b: Any) -> bool:
    return bool(a.token_ids == b.token_ids and a.logprobs == b.logprobs and a.prompt_logprobs == b.prompt_logprobs)


def test_greedy_equals_a_dense_loop(make_driver: Callable[..., Driver], fake_logits: History) -> None:
    sequence = alone(make_driver, PROMPT, SamplingParams(temperature=0.0), 0, 20)
    expected = list(PROMPT)
    for _ in range(20):
        expected.append(int(fake_logits(np.array(expected)).argmax()))
    assert sequence.token_ids == expected


def test_logprobs_and_prompt_logprobs_score_raw_logits(
    make_driver: Callable[..., Driver], fake_logits: History
) -> None:
    params = SamplingParams(temperature=0.5, logprobs=2, prompt_logprobs=3, logit_bias={1: 9.0}, presence_penalty=1.0)
    sequence = alone(make_driver, PROMPT, params, 3, 6)
    tokens = np.array(sequence.token_ids)
    histories = np.array([fake_logits(tokens[:p]) for p in range(1, len(tokens))])
    split = len(PROMPT) - 1
    assert sequence.prompt_logprobs == logprobs.score(histories[:split], tokens[1 : split + 1], 3)
    assert sequence.logprobs == logprobs.score(histories[split:], tokens[split + 1 :], 2)


def test_same_seed_same_text_and_another_seed_another(make_driver: Callable[..., Driver]) -> None:
    texts = [alone(make_driver, PROMPT, SamplingParams(), seed, 15).output for seed in (7, 7, 8, -7, 2**64 + 7)]
    assert texts[0] == texts[1] == texts[4]
    assert texts[0] != texts[2]
    assert texts[0] != texts[3]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_batch_chunking_and_preemption_gives_the_same_bits(
    make_driver: Callable[..., Driver], data: st.DataObject
) -> None:
    num_sequences = data.draw(st.integers(1, 8))
    cases = [
        (
            data.draw(st.lists(st.integers(0, 59), min_size=1, max_size=25)),
            data.draw(st.sampled_from(MANY_PARAMS)),
            data.draw(st.integers(0, 2**40)),
        )
        for _ in range(num_sequences)
    ]
    driver, sequences, length = make_driver(), [], 8
    waiting = list(cases)
    while waiting or any(len(s.output) < length for s in sequences):
        if waiting and not data.draw(st.booleans()):
            sequences.append(driver.add(*waiting.pop(0)))
        open_ones = [s for s in sequences if len(s.output) < length]
        if not open_ones:
            continue
        if data.draw(st.integers(0, 4)) == 4:
            driver.preempt(data.draw(st.sampled_from(open_ones)))
        driver.step(data.draw(st.sampled_from([None, 1, 2, 3, 7])), open_ones)
    for s, case in zip(sequences, cases, strict=True):
        assert same(s, alone(make_driver, *case, length))


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 9])
def test_prompt_logprobs_of_any_chunking_equal_one_shot(make_driver: Callable[..., Driver], chunk: int) -> None:
    params = SamplingParams(prompt_logprobs=4)
    driver = make_driver()
    chunked = driver.add(PROMPT, params)
    driver.generate(3, chunk)
    whole = alone(make_driver, PROMPT, params, 0, 3)
    assert whole.prompt_logprobs.num_rows == len(PROMPT) - 1
    assert same(chunked, whole)


def test_delivered_prompt_logprobs_are_not_repeated_after_preemption(make_driver: Callable[..., Driver]) -> None:
    params = SamplingParams(prompt_logprobs=1)
    driver = make_driver()
    sequence = driver.add(PROMPT, params)
    assert driver.step(4).prompt_logprobs[sequence.slot].num_rows == 4
    driver.preempt(sequence)
    assert driver.step(3).prompt_logprobs == {}
    assert driver.step(3).prompt_logprobs[sequence.slot].num_rows == 2
    driver.generate(5)
    driver.preempt(sequence)
    driver.generate(8)
    assert same(sequence, alone(make_driver, PROMPT, params, 0, 8))


def test_one_token_prompt_has_no_prompt_logprobs(make_driver: Callable[..., Driver]) -> None:
    sequence = alone(make_driver, [5], SamplingParams(prompt_logprobs=1), 0, 2)
    assert sequence.prompt_logprobs is None
    assert len(sequence.output) == 2


def test_long_scored_chunks_run_in_bounded_passes(
    make_driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(prompt_logprobs=2), SamplingParams(prompt_logprobs=0), SamplingParams(logprobs=1)]
    prompts = [list(range(40)), list(range(30)), list(range(20))]
    expected = [alone(make_driver, p, q, i, 4) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    monkeypatch.setattr(model_runner, "_PROMPT_LOGITS_BYTES", 61 * 4 * 7)  # seven rows
    driver = make_driver()
    sequences = [driver.add(p, q, i) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    driver.step()
    assert driver.backend.num_runs > 1
    assert driver.backend.max_logit_rows <= 7 + len(sequences)
    driver.generate(4)
    assert all(same(a, b) for a, b in zip(sequences, expected, strict=True))


def test_logits_that_are_not_finite_fail_their_sequence_alone(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    params = SamplingParams(logprobs=1)
    good = [driver.add([*PROMPT, i], params, i) for i in range(3)]
    bad = [driver.add([*PROMPT, 60, i], params, i) for i in range(3)]  # 60 poisons
    scored = driver.add([1, 60, 2], SamplingParams(prompt_logprobs=1))
    result = driver.step()
    assert set(result.errors) == {s.slot for s in (*bad, scored)}
    assert all(s.error == sampler.NOT_FINITE and not s.output for s in (*bad, scored))
    assert set(result.logprobs) == {s.slot for s in good}
    assert not result.prompt_logprobs
    for s in (*bad, scored):
        driver.remove(s)
    driver.generate(6)
    assert all(same(s, alone(make_driver, [*PROMPT, i], params, i, 6)) for i, s in enumerate(good))


def test_a_sequence_without_any_allowed_token_fails_with_the_reason(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    nothing = driver.add(PROMPT, SamplingParams(bad_words_token_ids=tuple((i,) for i in range(61))))
    other = driver.add(PROMPT, SamplingParams())
    driver.step()
    assert nothing.error == sampler.ALL_BANNED
    assert other.error is None
    assert len(other.output) == 1


def test_min_tokens_and_bad_words_hold_along_the_text(make_driver: Callable[..., Driver]) -> None:
    endings = {1, 8}  # 1 is the fake model's EOS
    pushed = {1: 100.0, 8: 100.0}
    params = SamplingParams(min_tokens=6, stop_token_ids=(8,), logit_bias=pushed, ignore_eos=True)
    output = alone(make_driver, PROMPT, params, 0, 10).output
    assert not endings & set(output[:6])
    assert set(output[6:]) <= endings
    params = SamplingParams(logit_bias={4: 200.0, 6: 100.0}, bad_words_token_ids=((4, 4),), temperature=0.0)
    assert alone(make_driver, PROMPT, params, 0, 6).output == [6, 4, 6, 4, 6, 4]  # the prompt ends in 4


def test_a_step_that_only_releases_runs_no_model(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    sequence = driver.add(PROMPT, SamplingParams())
    driver.step()
    driver.remove(sequence)
    runs = driver.backend.num_runs
    result = driver.step()
    assert driver.backend.num_runs == runs
    assert result.slots == []
