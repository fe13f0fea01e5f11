"""Budgets of thoughts: when the closing marker is forced, and that it comes the same in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.constraints import Constraints
from headrace.runner.thinking import ThinkingFollower
from headrace.types import SamplingParams, ThinkingBudget

OPEN, CLOSE = (10, 11), (20, 21, 20, 22)
SPACE, WORD = 3, 4


def budget(max_tokens: int, *, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(is_open, OPEN, CLOSE, max_tokens)


def play(follower: ThinkingFollower, wanted: list[int]) -> list[int]:
    """What comes out where a model wants these tokens."""
    output = []
    for token_id in wanted:
        forced_id = follower.forced_id
        output.append(token_id if forced_id is None else forced_id)
        follower.accept(output[-1])
    return output


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_thoughts_are_closed_when_their_budget_is_used(max_tokens: int) -> None:
    expected = [WORD] * max_tokens + [*CLOSE] + [WORD] * 5
    assert play(ThinkingFollower(budget(max_tokens)), [WORD] * len(expected)) == expected
    opened = [SPACE, *OPEN]
    wanted = opened + [WORD] * len(expected)
    assert play(ThinkingFollower(budget(max_tokens, is_open=False)), wanted) == opened + expected


def test_what_closes_by_itself_or_never_opens_is_left_alone() -> None:
    for wanted in ([WORD, *CLOSE, *OPEN] + [WORD] * 9, [*CLOSE, *[WORD] * 9]):
        assert play(ThinkingFollower(budget(5)), wanted) == wanted
    for wanted in ([WORD] * 9, [SPACE, SPACE, WORD, *OPEN, *[WORD] * 9], [OPEN[0], WORD, WORD, *OPEN, *[WORD] * 9]):
        assert play(ThinkingFollower(budget(0, is_open=False)), wanted) == wanted


def test_a_marker_that_has_begun_is_only_finished() -> None:
    for begun in range(1, len(CLOSE)):
        output = play(ThinkingFollower(budget(begun + 1)), [WORD, *CLOSE[:begun], *[WORD] * 8])
        assert output == [WORD, *CLOSE, *[WORD] * (8 - len(CLOSE) + begun)]
    # 20 21 20 | 21 20 22: what looked like one marker was the beginning of another
    wanted = [20, 21, 20, 21, 20, 22, WORD]
    assert play(ThinkingFollower(budget(20)), wanted) == wanted
    assert play(ThinkingFollower(budget(4)), [20, 21, 20, 21, WORD, WORD, WORD]) == wanted


@given(
    st.lists(st.sampled_from([*OPEN, *CLOSE, SPACE, WORD]), max_size=20), st.integers(0, 6), st.booleans(), st.data()
)
def test_state_follows_from_the_output(wanted: list[int], most: int, is_open: bool, data: st.DataObject) -> None:
    own = budget(most, is_open=is_open)
    expected = play(ThinkingFollower(own), wanted)
    cut = data.draw(st.integers(0, len(wanted)))
    assert play(ThinkingFollower(own, expected[:cut]), wanted[cut:]) == expected[cut:]


# ------------------------------------------------------------------------------------------------- in the batch


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [None, 2])
def test_company_chunks_and_preemption_change_nothing(
    make_driver: Callable[..., Any], temperature: float, chunk: int | None
) -> None:
    params = SamplingParams(temperature=temperature, thinking=budget(3))
    alone, driver = make_driver(), make_driver()
    free, expected = alone.add([7, 8, 9], SamplingParams(temperature=temperature), seed=5), None
    expected = alone.add([7, 8, 9], params, seed=5)
    alone.generate(12)
    assert expected.output[:3] == free.output[:3]
    assert expected.output[3:7] == list(CLOSE)
    found = driver.add([7, 8, 9], params, seed=5)
    other = driver.add([7, 8, 9], SamplingParams(temperature=temperature), seed=5)
    for stop in (2, 5, 8):  # thinking, amid the marker, and behind it
        driver.generate(stop, chunk)
        driver.preempt(found)
    driver.generate(12, chunk)
    assert found.output == expected.output
    assert other.output == free.output


def test_a_grammar_that_wants_another_token_first_is_obeyed() -> None:
    constraints = Constraints(None, 30)
    constraints._thoughts[4] = ThinkingFollower(budget(0))
    allowed, other = np.zeros(30, np.float32), np.full(30, -np.inf, np.float32)
    other[WORD] = 0.0
    masks: dict[int, Any] = {0: allowed}
    constraints._end_thoughts([4], masks)
    assert np.flatnonzero(masks[0] == 0).tolist() == [CLOSE[0]]
    for mask in (other, "it has failed"):
        masks = {0: mask}
        constraints._end_thoughts([4], masks)
        assert masks[0] is mask
