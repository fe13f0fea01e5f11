"""Random numbers of sampling: known values, range, spread, and independence of seeds and positions."""

from __future__ import annotations

import numpy as np

from headrace.runner.random import mix64, uniform


def draw(seed: int, positions: np.ndarray) -> np.ndarray:
    return np.array([uniform(seed, position) for position in positions.tolist()])


def test_finaliser_matches_published_splitmix64_outputs() -> None:
    # The first outputs of splitmix64.c from state 0.
    assert [hex(mix64(n * 0x9E3779B97F4A7C15)) for n in (1, 2, 3)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_stays_inside_the_open_interval_and_is_uniform() -> None:
    values = draw(7, np.arange(200_000))
    assert values.min() > 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, 100, (0.0, 1.0))[0]
    chi_square = ((counts - 2000.0) ** 2 / 2000.0).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: mean 99, standard deviation 14


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    positions = np.arange(20_000)
    a, b = draw(41, positions), draw(42, positions)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(a[1:], b[:-1])[0, 1]) < 0.03


def test_depends_on_seed_and_position_alone() -> None:
    together = [uniform(seed, position) for seed, position in ((3, 10), (2**64 - 1, 11), (3, 12))]
    assert together[2] == draw(3, np.array([12]))[0]
    assert len(set(together)) == 3
    assert uniform(-1, 11) == together[1], "a seed counts modulo 2**64"


def test_draws_what_it_always_drew() -> None:
    values = [uniform(0, 0), uniform(7, 1), uniform(2**62 + 5, 4096)]
    assert values == [0.6524484863740322, 0.6497043364684557, 0.46855855026918125]
