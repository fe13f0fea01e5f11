"""Tiny models, an engine on one of them, and what a fresh engine with each would generate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.testing.refresh_rig import RefreshRig
from headrace.testing.tiny import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A folder of a tiny model per seed."""
    root = tmp_path_factory.mktemp("models")
    return lambda seed: write_tiny_model(root / f"seed{seed}", seed=seed)


@pytest.fixture
def rig(models: Callable[[int], Path]) -> RefreshRig:
    return RefreshRig(models(1))


@pytest.fixture(scope="module")
def fresh(models: Callable[[int], Path]) -> Callable[[int], list[int]]:
    """What a fresh engine with a model's weights generates."""
    return lambda seed: RefreshRig(models(seed)).generate()
