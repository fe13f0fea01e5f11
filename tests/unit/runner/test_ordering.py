"""The order of logits: falling, ties by lower id, for every selection size."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.ordering import falling, rank_of, top_ids

FEW_VALUES = st.sampled_from([-np.inf, -3.5, -0.0, 0.0, 1e-42, 1.0, 1.0000001, 3e38])


@given(st.lists(FEW_VALUES, min_size=1, max_size=40), st.data())
def test_equals_python_sort(values: list[float], data: st.DataObject) -> None:
    row = np.array(values, np.float32)
    expected = sorted(range(len(values)), key=lambda i: (-float(row[i]), i))
    k = data.draw(st.integers(1, len(values) + 2))
    assert falling(row).tolist() == expected
    assert top_ids(row, k).tolist() == expected[:k]
    assert [rank_of(row, i) for i in expected] == list(range(1, len(values) + 1))


def test_large_row_equals_stable_argsort() -> None:
    row = np.random.default_rng(1).integers(-500, 500, 5000).astype(np.float32)
    expected = np.argsort(-row, kind="stable")
    assert (top_ids(row, 700) == expected[:700]).all()
