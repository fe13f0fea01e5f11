"""Random numbers of sampling: one uniform in (0, 1), a pure function of (seed, position).

The sampler calls it. Position is the number of tokens that stand before the sampled one, so a seeded sequence draws the
same numbers alone, in any batch, and after a preemption; no generator state exists that could be lost.

SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the finaliser
constants of Vigna's public-domain splitmix64.c. Its n-th output is a mix of start + n * gamma, which makes it a
counter. Plain integers: a step draws few numbers, and numpy would need a dozen calls for them.
"""

from __future__ import annotations

from typing import Final

_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1
_STEP: Final = 2.0**-52


def mix64(value: int) -> int:
    """The SplitMix64 finaliser, modulo 2**64."""
    value &= _MASK
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """In the open interval (0, 1); seeds count modulo 2**64.

    The seed is mixed first, so that neighbouring seeds (choices of one request) start far apart in the counter.
    """
    bits = mix64(mix64(seed + _GAMMA) + (position + 1) * _GAMMA)
    # 52 bits and a half: never 0, never 1, exact in float64.
    return ((bits >> 12) + 0.5) * _STEP
