"""Activations in NumPy, evaluated at once. See `attention`: exponentials and hyperbolic tangents
take 20 ns in MLX's build and 2 ns in NumPy. Formulas of `mlx.nn` (mlx/nn/layers/activations.py
0.32.4)."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

WORTH = 1 << 13
"""Elements below which synchronisation costs more than it saves."""


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """`silu(gate) * x`; two arrays of one shape, float32."""
    out = _silu(gate)
    mx.eval(x)
    out *= np.asarray(x)
    return mx.array(out)


def gelu_tanh(x: mx.array) -> mx.array:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`; any shape, float32."""
    mx.eval(x)
    own = np.asarray(x)
    out = own * own
    out *= np.float32(0.044715)
    out += np.float32(1)
    out *= own
    out *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(out, out=out)
    out += np.float32(1)
    out *= own
    out *= np.float32(0.5)
    return mx.array(out)


def _silu(x: mx.array) -> NDArray[np.float32]:
    mx.eval(x)
    own = np.asarray(x)
    out: NDArray[np.float32] = np.negative(own)
    with np.errstate(over="ignore"):  # far below zero the quotient is zero, as it should be
        np.exp(out, out=out)
    out += np.float32(1)
    np.divide(own, out, out=out)
    return out
