"""What the tests of the compiled kernels share. Most run on each instruction set that the machine has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(params=["portable", "avx2", "avx512"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of one instruction set, where the machine has it."""
    native = pytest.importorskip("headrace.kernels.native._native", reason="the compiled kernels are not there")
    name: str = request.param
    if not native.force_instruction_set(name):
        pytest.skip(f"no {name} here")
    assert native.instruction_set() == name
    yield name
    native.force_instruction_set("")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A test's own numbers, the same in every run."""
    return np.random.default_rng(sum(request.node.nodeid.encode()))
