"""Fixtures that every tier shares: the tiny random model, and the real models where they are on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a byte-level tokenizer."""
    from headrace.testing.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


def _cached(alias: str) -> Path:
    from headrace.weights.hub import cached_alias_path

    path = cached_alias_path(alias)
    if path is None:
        pytest.skip(f"{alias} is not in the cache; `headrace pull {alias}` fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _cached("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return _cached("gemma3-270m")
