"""Sizes: what is accepted, what is refused, and that printing and parsing agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.size import format_size, parse_size
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5G", 3 << 29),
        ("4GB", 4 * 10**9),
        ("10k", 10240),
        ("1048576", 1 << 20),
        ("7B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_parse(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiBs", "1e9", "nan", "1,5G", "2 G iB"])
def test_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_what_is_printed_can_be_typed(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == pytest.approx(num_bytes, rel=1e-3)
