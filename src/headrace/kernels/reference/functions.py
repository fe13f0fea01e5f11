"""Activation functions in numpy, float32 in and out."""

from __future__ import annotations

import math

import numpy as np

from headrace.kernels.reference.arithmetic import Floats, Function

# Numerical Recipes' rational Chebyshev fit of erfc (W. H. Press et al., 2nd edition, 6.2): relative error below 1.2e-7.
ERFC_COEFFICIENTS = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def silu(x: Floats) -> Floats:
    denominator = np.exp(-x)
    denominator += 1
    return np.divide(x, denominator, out=denominator)


def sigmoid(x: Floats) -> Floats:
    denominator = np.exp(-x)
    denominator += 1
    return np.divide(np.float32(1), denominator, out=denominator)


def gelu(x: Floats) -> Floats:
    """x * Phi(x), by way of erfc because numpy has no erf."""
    z = np.abs(x, dtype=np.float64) / math.sqrt(2)
    t = 1.0 / (1.0 + 0.5 * z)
    polynomial = np.zeros_like(t)
    for coefficient in reversed(ERFC_COEFFICIENTS):
        polynomial = polynomial * t + coefficient
    tail = 0.5 * t * np.exp(-z * z + polynomial)  # Phi(-|x|)
    return (x * np.where(x < 0, tail, 1.0 - tail)).astype(np.float32)


def gelu_tanh(x: Floats) -> Floats:
    inner = x * x
    inner *= np.float32(0.044715)
    inner += 1
    inner *= x
    inner *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(inner, out=inner)
    inner += 1
    inner *= x
    inner *= np.float32(0.5)
    return inner


ACTIVATIONS: dict[str, Function] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
