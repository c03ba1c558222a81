"""Allocation of the buffers of a row's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..upstream.cache_classes import SparseKVCache
from .kv_capacity import whole_steps
from .memory import leaves
from .prefix_cache.layers import Kind, kind


def grow_by(cache: Sequence[Any], tokens: int) -> None:
    """Let layers that keep every token allocate capacity for `tokens` more at their next
    allocation. A fresh cache gets its buffers in the shape and dtype of the first pass. Upstream
    allocates whole steps of `step` tokens (mlx_lm/models/cache.py 0.32.2,
    `KVCache.update_and_fetch`, `QuantizedKVCache.update_and_fetch`) and writes in place while the
    capacity lasts. Windows and recurrent states do not grow."""
    for layer in leaves(cache):
        if hasattr(layer, "step") and hasattr(layer, "__dict__") and _keeps_all(layer):
            layer.step = whole_steps(tokens)


def _keeps_all(layer: Any) -> bool:
    return isinstance(layer, SparseKVCache) or kind(layer) is Kind.APPEND
