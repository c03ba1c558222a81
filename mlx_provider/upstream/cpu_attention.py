"""Attention on a CPU whose MLX build is slow at exponentials.

Outside of macOS, MLX's CPU build (0.32.4, x86-64) takes some 20 ns for the exponential of one
score, NumPy 2 ns: with a few hundred tokens of context that is most of what attention costs, with
a few thousand most of a prompt's time. Here all of it is NumPy's, over blocks of queries that each
see no key beyond their own position; keys and values are read where the cache has them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
"""Scores of one block: few enough to be at hand, many enough to be worth a call."""
WORTH = 1 << 12
"""Scores below which waiting for the keys costs more than it saves."""


def applies(queries: mx.array, keys: Any, values: Any, options: Mapping[str, Any]) -> bool:
    """Whether `attend(queries, keys, values, **options)` is right here, and faster.

    Not for sinks, quantised or half-precision keys.
    """
    return (
        sys.platform != "darwin"
        and mx.default_device().type == mx.DeviceType.cpu
        and options.keys() == {"scale", "mask"}
        and isinstance(keys, mx.array)
        and isinstance(values, mx.array)
        and queries.shape[0] * queries.shape[1] * queries.shape[2] * keys.shape[2] >= WORTH
        and {queries.dtype, keys.dtype, values.dtype} == {mx.float32}
    )


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Same as `mx.fast.scaled_dot_product_attention`, evaluated at once.

    Shapes: `queries` (B, H, L, D), `keys` (B, Hk, S, D), `values` (B, Hk, S, Dv) with H a multiple
    of Hk; `mask` `"causal"`, or an array that broadcasts to (B, H, L, S): bool (may see) or float
    (added). Returns (B, H, L, Dv).
    """
    B, H, L, D = queries.shape
    Hk, S = keys.shape[1], keys.shape[2]
    full = None if mask is None or isinstance(mask, str) else _masked(mask, B, Hk, H, L, S)
    _one_thread()
    mx.eval(queries, keys, values)
    q = (np.asarray(queries) * np.float32(scale)).reshape(B, Hk, H // Hk, L, D)
    k, v = np.asarray(keys).swapaxes(-1, -2), np.asarray(values)
    size = max(1, BLOCK // (B * H * S))
    out = []
    for start in range(0, L, size):
        stop = min(L, start + size)
        seen = S - L + stop if mask == "causal" else S
        block = q[:, :, :, start:stop].reshape(B, Hk, -1, D)
        scores = (block @ k[..., :seen]).reshape(B, Hk, H // Hk, stop - start, seen)
        if full is not None:
            scores = _apply(full[..., start:stop, :], scores)
        elif mask == "causal":
            _hide_later(scores)
        weights, total = _exponentials(scores.reshape(B, Hk, -1, seen))
        mean = (weights @ v[:, :, :seen]) / total
        out.append(mean.reshape(B, Hk, H // Hk, stop - start, -1))
    return mx.array(np.concatenate(out, axis=3).reshape(B, H, L, -1))


@functools.cache
def _one_thread() -> None:
    """Let NumPy multiply in this thread alone, from now on.

    The threads of its BLAS (the one in its wheel) and those of MLX's wait for work by spinning,
    and would keep the cores from each other: a chunk of 20 ms then takes 180 now and then.
    """
    from threadpoolctl import ThreadpoolController

    own = [one.filepath for one in ThreadpoolController().lib_controllers]
    bundled = [path for path in own if "numpy.libs" in path]
    ThreadpoolController().select(filepath=bundled).limit(limits=1)


def _masked(mask: mx.array, B: int, Hk: int, H: int, L: int, S: int) -> NDArray[Any]:
    """The mask as (B or 1, Hk or 1, H / Hk or 1, L or 1, S)."""
    found = np.array(mask)
    found = found.reshape((1,) * (4 - found.ndim) + found.shape)
    rows, heads = found.shape[:2]
    split = (1, 1) if heads == 1 else (Hk, H // Hk)
    return np.broadcast_to(found.reshape(rows, *split, *found.shape[2:]), (rows, *split, L, S))


def _apply(mask: NDArray[Any], scores: NDArray[np.float32]) -> NDArray[np.float32]:
    if mask.dtype == np.bool_:
        return np.where(mask, scores, np.finfo(np.float32).min)
    scores += mask
    return scores


def _hide_later(scores: NDArray[np.float32]) -> None:
    """The last queries are the last positions: each sees itself and what is before it."""
    count = scores.shape[-2]
    later = np.triu(np.ones((count, count), dtype=np.bool_), 1)
    scores[..., -count:][..., later] = np.finfo(np.float32).min


def _exponentials(
    scores: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Softmax over the last axis before its division, in place, and the divisor."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True)
