"""The window of loads and the measure of balance, with numbers worked out by hand."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.eplb.layout import ExpertMap, initial_map
from headrace.eplb.stats import LoadWindow, balance, rank_loads, summarise
from headrace.errors import ConfigError, InvalidRequest


def counts(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_a_window_sums_steps_and_knows_when_they_were() -> None:
    window = LoadWindow(2, 3)
    window.add(counts([1, 2, 3], [4, 0, 0]), 10.0)
    window.add(counts([1, 0, 0], [0, 0, 9]), 12.5)
    load = window.read()
    assert load.tokens_LE.tolist() == [[2, 2, 3], [4, 0, 9]]
    assert (load.num_steps, load.start, load.end, load.duration_s) == (2, 10.0, 12.5, 2.5)
    assert load.num_tokens == 13


def test_an_empty_window() -> None:
    load = LoadWindow(2, 3).read()
    assert (load.num_steps, load.num_tokens, load.start, load.end, load.duration_s) == (0, 0, None, None, 0.0)
    assert load.tokens_LE.tolist() == [[0, 0, 0]] * 2


def test_old_steps_leave_in_buckets() -> None:
    window = LoadWindow(1, 1, num_steps=6, num_buckets=3)
    for step in range(1, 7):
        window.add(counts([step]), float(step))
    assert (window.read().tokens_LE.item(), window.read().num_steps) == (21, 6)
    window.add(counts([7]), 7.0)  # steps 1 and 2 go
    load = window.read()
    assert (load.tokens_LE.item(), load.num_steps, load.start, load.end) == (3 + 4 + 5 + 6 + 7, 5, 3.0, 7.0)


def test_steps_that_are_added_together_leave_together() -> None:
    window = LoadWindow(1, 1, num_steps=6, num_buckets=3)
    for tokens, num_steps in ((1, 2), (2, 1), (4, 2), (8, 1)):
        window.add(counts([tokens]), 0.0, num_steps)
    assert (window.read().tokens_LE.item(), window.read().num_steps) == (15, 6)
    window.add(counts([16]), 0.0, 3)  # the first three go
    assert (window.read().tokens_LE.item(), window.read().num_steps) == (8 + 4 + 16, 6)


@given(st.integers(1, 12), st.integers(1, 15), st.lists(st.integers(0, 100), max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_window_is_the_sum_of_its_last_steps(num_steps: int, num_buckets: int, tokens: list[int]) -> None:
    window = LoadWindow(1, 1, num_steps, num_buckets)
    for time, one in enumerate(tokens):
        window.add(counts([one]), float(time))
    load = window.read()
    bucket = -(-num_steps // num_buckets)
    assert min(len(tokens), num_steps - bucket + 1) <= load.num_steps <= num_steps
    assert load.tokens_LE.item() == sum(tokens[len(tokens) - load.num_steps :])
    if tokens:
        assert (load.start, load.end) == (len(tokens) - load.num_steps, len(tokens) - 1)
    assert len(window._buckets) <= num_buckets + 1


def test_what_was_read_does_not_change() -> None:
    window = LoadWindow(1, 2)
    step = counts([1, 2])
    window.add(step, 0.0)
    load = window.read()
    step[...] = 100
    window.add(counts([5, 5]), 1.0)
    assert load.tokens_LE.tolist() == [[1, 2]]
    assert window.read().tokens_LE.tolist() == [[6, 7]]


def test_reading_with_clear_loses_no_step_and_reads_none_twice() -> None:
    window = LoadWindow(1, 1, num_steps=100_000)
    done = threading.Event()
    read = []

    def reader() -> None:
        while not done.is_set():
            read.append(window.read(clear=True))

    thread = threading.Thread(target=reader)
    thread.start()
    for step in range(2000):
        window.add(counts([1]), float(step))
    done.set()
    thread.join()
    read.append(window.read(clear=True))
    assert sum(load.num_steps for load in read) == 2000
    assert sum(load.tokens_LE.item() for load in read) == 2000
    assert window.read().num_steps == 0


@pytest.mark.parametrize("wrong", [counts([1]), counts([1, 2, 3]), np.ones((1, 2))])
def test_counts_of_another_kind(wrong: np.ndarray) -> None:
    with pytest.raises(InvalidRequest, match=r"integers of the shape \[1, 2\]"):
        LoadWindow(1, 2).add(wrong, 0.0)


def test_a_window_without_steps_cannot_be() -> None:
    with pytest.raises(ConfigError, match="window_steps is 0; it must be at least 1"):
        LoadWindow(1, 1, num_steps=0)


def test_balance_is_over_ranks_not_over_layers() -> None:
    # Both layers put all on one of two ranks, but on different ones: each is 0.5, although the ranks' totals are even.
    assert balance([[8, 0], [0, 8]]).tolist() == [0.5, 0.5]
    even = summarise(balance([[3, 1], [2, 2], [0, 0]]))
    assert even.per_layer == pytest.approx([2 / 3, 1, 1])
    assert (even.mean, even.worst) == pytest.approx((8 / 9, 2 / 3))


def test_ranks_get_equal_shares_of_an_expert() -> None:
    expert_map = ExpertMap(np.array([[0, 1, 0, 2], [0, 1, 2, 2]]), 3, 2)
    assert rank_loads([[10, 3, 4], [1, 2, 6]], expert_map).tolist() == [[8, 9], [3, 6]]


def test_loads_of_another_map() -> None:
    with pytest.raises(InvalidRequest, match=r"shape \[1, 3\]; the map's layers x experts are \[1, 4\]"):
        rank_loads([[1, 2, 3]], initial_map(1, 4, 0, 2))
    with pytest.raises(InvalidRequest, match=r"counts\[0, 2\] is -1"):
        rank_loads([[1, 2, -1, 0]], initial_map(1, 4, 0, 2))
