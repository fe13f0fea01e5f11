"""Turns a `RopeConfig` into rotary frequencies with their scaling in them.

Called by `decoder.py`. Scalings: linear (kaiokendev), dynamic NTK (within the model's own length it equals none, and
longer sequences are refused), llama3 (Llama 3.1), YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.kernels.ops import RopeSpec
from headrace.models.config import RopeConfig

Frequencies = npt.NDArray[np.float64]
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_spec(rope: RopeConfig) -> RopeSpec:
    """Frequencies are computed in float64 and rounded once."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.divisors is not None:
        inv_freq /= np.array(rope.divisors)
    if rope.scaling == "linear":
        inv_freq /= rope.factor
    elif rope.scaling == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.scaling == "yarn":
        inv_freq = _yarn(inv_freq, rope)
    scale = rope.attention_factor if rope.scaling == "yarn" else 1.0
    return RopeSpec(inv_freq.astype(np.float32), rope.is_interleaved, scale)


def yarn_attention_factor(factor: float) -> float:
    """YaRN's own factor on cos and sin."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _llama3(inv_freq: Frequencies, rope: RopeConfig) -> Frequencies:
    """Short waves stay, long ones stretch by `factor`, those between are mixed."""
    turns = rope.original_max_positions * inv_freq / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return share * inv_freq + (1 - share) * inv_freq / rope.factor


def _yarn(inv_freq: Frequencies, rope: RopeConfig) -> Frequencies:
    """Dimensions below `low` stay, those above `high` stretch by `factor`, a ramp lies between."""

    def dimension(num_turns: float) -> float:
        turns = rope.original_max_positions / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp: Frequencies = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    mixed: Frequencies = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)
    return mixed
