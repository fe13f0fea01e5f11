"""Embeddings on a worker: which hidden states count, how they become one vector, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.runner.pooling import Pooler
from headrace.types import SamplingParams

MakeDriver = Callable[..., Any]
POISON = 60  # of the fake backend: states after it are not finite
GREEDY = SamplingParams(temperature=0.0)


def pooled(hidden: np.ndarray, kind: str, cuts: list[int]) -> np.ndarray:
    pooler = Pooler(kind, len(hidden))
    for start, end in zip([0, *cuts], [*cuts, len(hidden)], strict=True):
        if count := pooler.num_wanted(start, end):
            pooler.add(hidden[end - count : end])
    return pooler.vector()


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_give_the_bits_of_the_whole(size: int) -> None:
    hidden = (np.random.default_rng(1).standard_normal((9, size)) * 1e3).astype(np.float32)
    whole = pooled(hidden, "mean", [])
    assert whole.dtype == np.float32
    np.testing.assert_allclose(whole, hidden.astype(np.float64).mean(axis=0), rtol=1e-6)
    assert pooled(hidden, "last", []).tobytes() == hidden[-1].tobytes()
    for cuts in ([1], [8], [3, 5], [1, 2, 3, 4, 5, 6, 7, 8]):
        assert pooled(hidden, "mean", cuts).tobytes() == whole.tobytes()
        assert pooled(hidden, "last", cuts).tobytes() == hidden[-1].tobytes()


def states(driver: Any, fake_logits: Callable[[np.ndarray], np.ndarray], prompt: list[int]) -> np.ndarray:
    return np.array([fake_logits(np.array(prompt[: end + 1]))[:50] for end in range(len(prompt))])


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_beside_sequences_that_generate(
    make_driver: MakeDriver, fake_logits: Callable[[np.ndarray], np.ndarray], chunk: int | None
) -> None:
    driver = make_driver()
    alone = make_driver()
    single = alone.add([7, 8, 9, 10], GREEDY)
    alone.generate(5)
    prompt = [5, 6, 7, 8, 9]
    last, writer, mean = (
        driver.add(prompt, SamplingParams(pooling="last")),
        driver.add([7, 8, 9, 10], GREEDY),
        driver.add(prompt, SamplingParams(pooling="mean")),
    )
    while last.embedding is None:
        driver.step(chunk)
    hidden = states(driver, fake_logits, prompt)
    assert last.embedding == hidden[-1].tobytes()
    assert mean.embedding == pooled(hidden, "mean", []).tobytes()
    assert (last.output, mean.output) == ([], [])
    for sequence in (last, mean):
        driver.remove(sequence)
    driver.generate(5, chunk)
    assert writer.output[:5] == single.output[:5]


def test_pooling_alone_computes_no_logits(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add([1, 2, 3], SamplingParams(pooling="mean"))
    driver.add([4, 5], SamplingParams(pooling="last"))
    driver.step()
    assert driver.backend.max_logit_rows == 0


def test_a_mean_begins_anew_after_a_preemption(
    make_driver: MakeDriver, fake_logits: Callable[[np.ndarray], np.ndarray]
) -> None:
    driver = make_driver()
    prompt = [5, 6, 7, 8, 9]
    mean = driver.add(prompt, SamplingParams(pooling="mean"))
    driver.step(3)
    driver.preempt(mean)
    driver.step()
    assert mean.embedding == pooled(states(driver, fake_logits, prompt), "mean", []).tobytes()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_states_that_are_not_finite_fail_their_sequence_alone(make_driver: MakeDriver, pooling: str) -> None:
    driver = make_driver()
    good, writer = driver.add([1, 2, 3], SamplingParams(pooling=pooling)), driver.add([4, 5], GREEDY)
    bad = [driver.add([POISON, each], SamplingParams(pooling=pooling)) for each in range(20 - 4)]
    driver.step()
    assert good.error is None
    assert good.embedding is not None
    assert len(writer.output) == 1
    failed = [each for each in bad if each.error is not None]
    assert failed, "most of the poisoned rows have their bad number among the first"
    assert all(each.error == "the model gave hidden states that are not finite" for each in failed)
    assert all(each.embedding is None for each in failed)
