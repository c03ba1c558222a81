"""mlx-vlm's gated delta rule in chunks that fit the tokens of a call.

Upstream (mlx_vlm/models/qwen3_5/gated_delta.py 0.7.10, `gated_delta_chunked`, in use wherever
there is no Metal) pads every call to whole chunks of 64 and solves each chunk in 64 steps that
follow one another: ten tokens take as long as sixty-four. Any chunk size gives the same result;
the steps inside a chunk and those from chunk to chunk are fewest near the root of the tokens.
On a CPU the whole rule is NumPy's (`cpu_gated_delta`), of one token (`gated_delta_ops`), too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from . import cpu_device
from .cpu_gated_delta import WORTH, gated_delta, gated_delta_step
from .stand_in import Function, stand_in

CHUNKED, STEPWISE = "gated_delta_chunked", "gated_delta_ops"
SMALLEST, LARGEST = 8, 64


def fit_chunks() -> None:
    """Replace the functions in upstream's module. Idempotent."""
    from mlx_vlm.models.qwen3_5 import gated_delta as module

    stand_in([module], CHUNKED, _fitted)
    stand_in([module], STEPWISE, _stepwise)


def _fitted(original: Function) -> Function:
    @functools.wraps(original)
    def fitted(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any = None) -> Any:
        arrays = (q, k, v, g, beta, state)
        if mask is None and _numpy_takes(arrays):
            return gated_delta(*arrays)
        return original(*arrays, mask, C=chunk_size(q.shape[1]))

    return fitted


def _stepwise(original: Function) -> Function:
    @functools.wraps(original)
    def step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None) -> Any:
        arrays = (q, k, v, g, beta, state)
        one = mask is None and state is not None and q.shape[1] == 1 and g.ndim == 3
        if one and state.size >= WORTH and _numpy_takes(arrays):
            return gated_delta_step(*arrays)
        return original(*arrays, mask)

    return step


def _numpy_takes(arrays: Sequence[mx.array]) -> bool:
    return cpu_device.in_use() and all(array.dtype == mx.float32 for array in arrays)


def chunk_size(tokens: int) -> int:
    """The power of two at or above the root of `tokens`, within bounds."""
    size = SMALLEST
    while size < LARGEST and size * size < tokens:
        size *= 2
    return size
