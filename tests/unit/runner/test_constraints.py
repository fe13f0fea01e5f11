"""Constrained slots among free ones: masks in the sampling step, and matchers that fail late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.grammar import GrammarError, Matcher
from headrace.types import GrammarSpec, SamplingParams

VOCAB_SIZE = 61
EOS = 1
EVEN = GrammarSpec("even", "")
FAILS_AT_3 = GrammarSpec("fails", "")
BROKEN = GrammarSpec("broken", "")


class EvenMatcher(Matcher):
    """Lets even ids above 1 come, and refuses to go on after `most` tokens."""

    def __init__(self, output: Sequence[int], most: int | None = None) -> None:
        self.output = list(output)
        self.most = most

    @property
    def error(self) -> str | None:
        return "no more" if self.most is not None and len(self.output) >= self.most else None

    def accept(self, *token_ids: int) -> None:
        assert all(token_id % 2 == 0 for token_id in token_ids)
        self.output += token_ids

    def mask(self) -> np.ndarray | None:
        if self.error is not None:
            return None
        ids = np.arange(VOCAB_SIZE)
        return np.where((ids % 2 == 0) & (ids > 1), np.float32(0), np.float32(-np.inf))


class Grammars:
    """Stands in for `GrammarCompiler`, and for what it compiles."""

    def __init__(self) -> None:
        self.matchers: list[EvenMatcher] = []

    def get(self, spec: GrammarSpec) -> Any:
        if spec == BROKEN:
            raise GrammarError("it broke")
        made = Grammars()
        made.matchers, made.most = self.matchers, 3 if spec == FAILS_AT_3 else None  # type: ignore[attr-defined]
        return made

    def matcher(self, output: Sequence[int]) -> EvenMatcher:
        self.matchers.append(EvenMatcher(output, self.most))  # type: ignore[attr-defined]
        return self.matchers[-1]


def params(grammar: GrammarSpec | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields}, grammar=grammar)


@pytest.fixture
def driver(make_driver: Callable[..., Any]) -> Any:
    return make_driver(grammars=Grammars())


def test_a_mask_binds_its_own_row_alone(driver: Any, make_driver: Callable[..., Any]) -> None:
    free = [driver.add([3, 5, n], params(None), seed=n) for n in range(4)]
    bound = [driver.add([3, 5, n], params(EVEN, temperature=t), seed=n) for n, t in enumerate((1.0, 0.0, 2.0))]
    driver.generate(12)
    assert all(token_id % 2 == 0 and token_id > 1 for each in bound for token_id in each.output)
    alone = make_driver()
    others = [alone.add([3, 5, n], params(None), seed=n) for n in range(4)]
    alone.generate(12)
    assert [each.output for each in free] == [each.output for each in others]
    assert any(token_id % 2 for each in free for token_id in each.output)


@pytest.mark.parametrize("chunk", [None, 2])
def test_company_chunks_and_preemption_change_nothing(driver: Any, make_driver: Any, chunk: int | None) -> None:
    alone = make_driver(grammars=Grammars())
    expected = alone.add([7, 8, 9, 10, 11], params(EVEN), seed=5)
    alone.generate(10)
    found = driver.add([7, 8, 9, 10, 11], params(EVEN), seed=5)
    driver.add([1, 2], params(None))
    driver.generate(4, chunk)
    driver.preempt(found)
    driver.generate(10, chunk)
    assert found.output == expected.output


def test_logprobs_are_of_the_raw_distribution(driver: Any, fake_logits: Callable[[np.ndarray], np.ndarray]) -> None:
    sequence = driver.add([3, 5], params(EVEN, temperature=0.0, logprobs=2))
    driver.generate(1)
    raw = fake_logits(np.array([3, 5]))
    ids, values, _ = sequence.logprobs.arrays()
    assert ids[0, 1] == raw.argmax()
    assert values[0, 0] == pytest.approx(
        raw[sequence.output[0]] - np.log(np.exp(raw.astype(np.float64)).sum()), abs=1e-5
    )


def test_a_matcher_that_fails_late_ends_that_sequence_alone(driver: Any) -> None:
    failing = driver.add([3, 5], params(FAILS_AT_3))
    others = [driver.add([4, 6], params(EVEN)), driver.add([4, 7], params(None))]
    driver.generate(6)
    assert failing.error == "the output cannot follow its grammar any more: no more"
    assert len(failing.output) == 3
    assert all(each.error is None and len(each.output) == 6 for each in others)


def test_a_grammar_that_is_gone_is_an_error_of_its_sequence(driver: Any) -> None:
    broken, other = driver.add([3], params(BROKEN)), driver.add([4], params(None))
    driver.generate(2)
    assert "it broke" in broken.error
    assert len(other.output) == 2


def test_bans_and_min_tokens_meet_a_mask(driver: Any) -> None:
    """Bans hold; min_tokens would ban every end, and gives way where nothing else is left."""
    evens = tuple((n,) for n in range(2, VOCAB_SIZE, 2))
    kept = driver.add([3], params(EVEN, bad_words_token_ids=evens[1:], logit_bias={3: 100.0}))
    nothing = driver.add([3], params(EVEN, bad_words_token_ids=evens))
    ending = driver.add([3], params(EVEN, min_tokens=5, bad_words_token_ids=evens[1:], stop_token_ids=(2,)))
    driver.generate(2)
    assert kept.output == [2, 2]
    assert "banned" in nothing.error
    assert ending.output == [2, 2]
