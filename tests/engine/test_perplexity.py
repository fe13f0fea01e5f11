"""Quality is not traded away in silence: SmolLM2's perplexity on a text with the compiled kernels, against float32.

The reference's numbers are stored, since it takes a minute (testing/perplexity.py); its first ones are checked here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.kernels import create_backend, has_native
from headrace.testing.perplexity import negative_log_likelihoods, perplexity, read_reference, window_ids

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not has_native(), reason="the compiled kernels are not there"),
]


@pytest.fixture(scope="module")
def windows(smollm2: Path) -> list[list[int]]:
    return window_ids(smollm2)


def test_stored_reference_is_that_of_the_model(smollm2: Path, windows: list[list[int]]) -> None:
    beginning = negative_log_likelihoods(create_backend("reference"), smollm2, [windows[0][:40]])[0]
    np.testing.assert_allclose(beginning, read_reference("smollm2")[0][:39], rtol=0, atol=2e-3)
    assert [len(window) + 1 for window in read_reference("smollm2")] == [len(window) for window in windows]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kv_cache_dtype", "limit"), [("auto", 0.01), ("int8", 0.02)])
def test_perplexity(smollm2: Path, windows: list[list[int]], kv_cache_dtype: str, limit: float) -> None:
    reference = read_reference("smollm2")
    backend = create_backend("native", kv_cache_dtype=kv_cache_dtype)
    found = negative_log_likelihoods(backend, smollm2, windows)
    loss = perplexity(found) / perplexity(reference) - 1
    print(f"perplexity {perplexity(found):.3f}, the reference's {perplexity(reference):.3f}: {loss:+.2%}")
    assert abs(loss) < limit
    # window by window too, so that a gain here does not hide a loss there: single windows vary about twice as much
    for got, expected in zip(found, reference, strict=True):
        assert abs(np.exp(np.mean(got - expected)) - 1) < 2 * limit
