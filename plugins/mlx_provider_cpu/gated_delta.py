"""The gated delta rule in NumPy: chunks of tokens at once, states from chunk to chunk.

The rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024): a state decays by `g`, and
replaces the value of a key by a new one at the rate `beta`. Within a chunk this is a unit
triangular system, solved for all chunks together by halves. MLX's CPU build (0.32.4) spends its
time on launching small operations.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .attention import numpy_alone

CHUNK = 16
"""Tokens; a power of two."""
LEAST_DECAY = 1e-6
"""A decay that underflows to zero would make quotients NaN."""

Floats = NDArray[np.float32]


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """Outputs (B, T, Hv, Dv) and state (B, Hv, Dv, Dk), evaluated at once. Shapes, all float32: `q`
    and `k` (B, T, Hk, Dk), `v` (B, T, Hv, Dv) with Hv a multiple of Hk, `g` and `beta` (B, T,
    Hv)."""
    numpy_alone()
    mx.eval(q, k, v, g, beta, state)
    tokens, repeats = q.shape[1], v.shape[2] // k.shape[2]
    count = -(-tokens // CHUNK)
    size = CHUNK if count > 1 else 1 << (tokens - 1).bit_length()
    queries, keys = (_chunks(np.repeat(np.asarray(x), repeats, 2), count, size) for x in (q, k))
    values = _chunks(np.asarray(v), count, size)
    rate = _chunks(np.asarray(beta)[..., None], count, size)
    # Padding of the last chunk neither decays nor learns.
    log = np.log(np.clip(np.asarray(g), LEAST_DECAY, 1.0))
    decay = np.cumsum(_chunks(log[..., None], count, size), axis=-2)
    out, after = _scan(queries, keys, values, decay, rate, np.asarray(state))
    B, H, _, _, Dv = out.shape
    rows = out.transpose(0, 2, 3, 1, 4).reshape(B, count * size, H, Dv)
    return mx.array(rows[:, :tokens]), mx.array(after)


def _chunks(x: Floats, count: int, size: int) -> Floats:
    """(B, T, H, D) padded with zeros as (B, H, count, size, D)."""
    B, T, H, D = x.shape
    whole = np.zeros((B, count * size, H, D), dtype=np.float32)
    whole[:, :T] = x
    return np.ascontiguousarray(whole.reshape(B, count, size, H, D).transpose(0, 3, 1, 2, 4))


def _scan(
    q: Floats, k: Floats, v: Floats, decay: Floats, rate: Floats, state: Floats
) -> tuple[Floats, Floats]:
    """Inputs (B, H, count, size, D); `decay`: logarithm from the chunk's start. Takes and returns
    the state as (B, H, Dv, Dk)."""
    size = q.shape[-2]
    earlier = np.tril(np.ones((size, size), dtype=np.float32))
    between = np.exp(np.where(earlier > 0, decay - decay.swapaxes(-1, -2), -np.inf))
    since = np.exp(decay)
    turned = k.swapaxes(-1, -2)
    inverse = _inverse(np.tril(rate * between * (k @ turned), -1))
    learnt = inverse @ (rate * v)
    forgot = inverse @ (rate * since * k)
    seen = between * (q @ turned)
    reads = since * q - seen @ forgot
    out = seen @ learnt
    left = np.exp(decay[..., -1:, :] - decay)
    held = state.swapaxes(-1, -2)
    for c in range(q.shape[2]):
        out[:, :, c] += reads[:, :, c] @ held
        new = left[:, :, c] * (learnt[:, :, c] - forgot[:, :, c] @ held)
        held = since[:, :, c, -1:, :] * held + turned[:, :, c] @ new
    return out, np.ascontiguousarray(held.swapaxes(-1, -2))


def _inverse(below: Floats) -> Floats:
    """Inverse of `1 + below`, `below` strictly lower triangular (..., n, n), n a power of two. By
    halves: of [[A, 0], [C, D]] it is [[A', 0], [-D' C A', D']]."""
    n = below.shape[-1]
    out = np.zeros_like(below)
    out[..., np.arange(n), np.arange(n)] = 1
    size = 1
    while size < n:
        for start in range(0, n, 2 * size):
            first, second = slice(start, start + size), slice(start + size, start + 2 * size)
            corner = out[..., second, second] @ below[..., second, first] @ out[..., first, first]
            out[..., second, first] = -corner
        size *= 2
    return out
