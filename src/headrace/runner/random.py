"""Random numbers of sampling: one uniform in (0, 1) per row, a pure function of (seed, position).

The sampler calls it. Position is the number of tokens that stand before the sampled one, so a seeded sequence draws the
same numbers alone, in any batch, and after a preemption; no generator state exists that could be lost.

SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the finaliser
constants of Vigna's public-domain splitmix64.c. Its n-th output is a mix of start + n * gamma, which makes it a
counter.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_DROP_BITS = np.uint64(12)
_STEP = 2.0**-52
SEED_MASK = (1 << 64) - 1


def mix64(values: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser, elementwise over uint64; wraps modulo 2**64."""
    values = (values ^ (values >> _SHIFT_1)) * _MIX_1
    values = (values ^ (values >> _SHIFT_2)) * _MIX_2
    mixed: np.ndarray = values ^ (values >> _SHIFT_3)
    return mixed


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in the open interval (0, 1), one per row, from uint64 seeds and non-negative positions.

    The seed is mixed first, so that neighbouring seeds (choices of one request) start far apart in the counter.
    """
    start = mix64(seeds + _GAMMA)
    bits = mix64(start + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    # 52 bits and a half: never 0, never 1, exact in float64.
    drawn: np.ndarray = ((bits >> _DROP_BITS).astype(np.float64) + 0.5) * _STEP
    return drawn
