"""Penalties, bias, bad words and min tokens: hand numbers, and counts that survive a preemption."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.edits import LogitEdits
from headrace.types import SamplingParams

VOCAB_SIZE = 10


def edited(params: SamplingParams, prompt: list[int], output: list[int], row: list[float] | None = None) -> np.ndarray:
    logits = np.array(row if row is not None else [float(i - 5) for i in range(VOCAB_SIZE)], np.float32)
    tokens = np.array(prompt + output, np.int32)
    LogitEdits(params, tokens, len(prompt), VOCAB_SIZE, (9,)).apply(logits, tokens)
    return logits


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    row = edited(SamplingParams(repetition_penalty=2.0), [8, 1], [7, 7])
    assert row.tolist() == [-5, -8, -3, -2, -1, 0, 1, 1, 1.5, 4]


def test_presence_and_frequency_count_the_output_alone() -> None:
    row = edited(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [8, 1], [7, 7, 2])
    assert row.tolist() == [-5, -4, -3.75, -2, -1, 0, 1, 1, 3, 4]


def test_penalties_add_up_in_vllm_order() -> None:
    row = edited(SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), [8], [7])
    assert row[7] == 2 / 2 - 0.25 - 0.5
    assert row[8] == 1.5


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), max_size=90),
    st.integers(0, 90),
    st.sampled_from([1.0, 0.5, 1.3]),
)
def test_incremental_counts_equal_rebuilt_ones(prompt: list[int], output: list[int], cut: int, penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=0.3, frequency_penalty=-0.7)
    grown = LogitEdits(params, np.array(prompt + output[:cut], np.int32), len(prompt), VOCAB_SIZE, ())
    for token_id in output[cut:]:
        grown.append(token_id)
    tokens = np.array(prompt + output, np.int32)
    rebuilt = LogitEdits(params, tokens, len(prompt), VOCAB_SIZE, ())
    rows = np.linspace(-3, 3, 2 * VOCAB_SIZE, dtype=np.float32).reshape(2, VOCAB_SIZE)
    rows[1] = rows[0]
    grown.apply(rows[0], tokens)
    rebuilt.apply(rows[1], tokens)
    assert rows[0].tobytes() == rows[1].tobytes()
    for token_id in range(VOCAB_SIZE):
        value = np.linspace(-3, 3, 2 * VOCAB_SIZE, dtype=np.float32)[token_id]
        if penalty != 1.0 and token_id in prompt + output:
            value = value / np.float32(penalty) if value > 0 else value * np.float32(penalty)
        count = output.count(token_id)
        assert rows[0][token_id] == pytest.approx(value + 0.7 * count - 0.3 * (count > 0), abs=1e-4)


def test_many_distinct_tokens_grow_the_counts() -> None:
    params = SamplingParams(presence_penalty=1.0)
    edits = LogitEdits(params, np.array([0], np.int32), 1, 500, ())
    for token_id in range(1, 400):
        edits.append(token_id)
    row = np.zeros(500, np.float32)
    edits.apply(row, np.arange(400, dtype=np.int32))
    assert (row[1:400] == -1).all()
    assert (row[400:] == 0).all()
    assert row[0] == 0


def test_bias_is_added_and_stays_finite() -> None:
    row = edited(
        SamplingParams(logit_bias={0: 100.0, 1: -100.0, 2: 1e300, 3: -1e300, -1: 5.0, VOCAB_SIZE: 5.0}), [4], []
    )
    assert row[0] == 95
    assert row[1] == -104
    assert np.isfinite(row).all()
    assert row.argmax() == 2
    assert row.argmin() == 3
    assert row[4:].tolist() == [-1, 0, 1, 2, 3, 4]


def test_bad_words_ban_single_tokens_always_and_phrases_when_begun() -> None:
    params = SamplingParams(bad_words_token_ids=((3,), (4, 5), (1, 2, 6), (), (99,), (7, 99)))

    def banned(*tokens: int) -> list[int]:
        return np.flatnonzero(np.isinf(edited(params, list(tokens[:1]), list(tokens[1:])))).tolist()

    assert banned(0) == [3]
    assert banned(0, 4) == [3, 5]
    assert banned(4) == [3, 5]  # begun by the prompt
    assert banned(4, 0) == [3]
    assert banned(0, 2) == [3]
    assert banned(1, 2) == [3, 6]
    assert banned(2) == [3]  # the text is shorter than the phrase


def test_min_tokens_bans_eos_and_stop_ids_until_reached() -> None:
    for ignore_eos in (False, True):
        params = SamplingParams(min_tokens=2, stop_token_ids=(3, 77), ignore_eos=ignore_eos, logit_bias={9: 100.0})
        for output, expected in (([], [3, 9]), ([5], [3, 9]), ([5, 5], []), ([5, 5, 5], [])):
            assert np.flatnonzero(np.isinf(edited(params, [1, 2, 3], output))).tolist() == expected


def test_penalty_leaves_a_ban_and_the_largest_logits_finite() -> None:
    for tiny in (1e-3, 1e-300):
        params = SamplingParams(bad_words_token_ids=((3,),), repetition_penalty=tiny, presence_penalty=-1e300)
        row = edited(params, [3, 4], [3, 0], [0.0] + [1e37] * (VOCAB_SIZE - 1))
        assert row[3] == -np.inf
        assert np.isfinite(np.delete(row, 3)).all()
