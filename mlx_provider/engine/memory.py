"""Memory of a model's rows, and the limits of the device."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..upstream.cache_lists import leaves
from .sizes import whole_steps

RESERVE = 0.15
"""Share of the working set that the device recommends, or of its own memory, that stays free: MLX
uses memory that it does not count. On CUDA these are the plans and workspaces of first passes, 3 to
12 GB on an H100 of 80 GB with a model of 8B."""
CUDA_RESERVE = 3 * 2**30
"""Bytes that stay free on any CUDA device: the least that was seen there."""
LEAST_SHARE = 0.5
"""Share of the free memory that is used even if the reserve is larger than the rest."""
HOST_SHARE = 0.7
"""Share of the host's memory, if the device does not report its own."""
POOL = 2 * 2**30
"""Most bytes of freed buffers that MLX keeps for reuse."""
POOL_SHARE = 1 / 16
"""Share of the memory limit that the pool may have at most: a small machine has small passes."""


@dataclass(frozen=True)
class MemoryProfile:
    """Cache bytes of one row: fixed state, plus bytes per token up to each window."""

    state_bytes: int
    token_bytes: int
    """Bytes per token of the layers that keep every token."""
    windows: tuple[tuple[int, int], ...] = ()
    """(window in tokens, bytes per token) of the layers that keep only a window of tokens."""

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a state that every token changes."""
        return self.state_bytes > 0

    def row_bytes(self, tokens: int) -> int:
        grown = whole_steps(tokens)
        windowed = sum(min(grown, window) * each for window, each in self.windows)
        return self.state_bytes + grown * self.token_bytes + windowed


def profile(cache: Sequence[Any]) -> MemoryProfile:
    """Measure a row cache that holds at least one token."""
    state, each, windows = 0, 0, []
    for layer in leaves(cache):
        size = sum(a.nbytes for a in arrays([layer]))
        keys = getattr(layer, "keys", None)
        if keys is None:
            state += size
            continue
        first = keys[0] if isinstance(keys, (tuple, list)) else keys
        per_token = -(-size // max(1, first.shape[2]))
        window = getattr(layer, "max_size", None) or getattr(layer, "chunk_size", None)
        if window is None:
            each += per_token
        else:
            windows.append((int(window), per_token))
    return MemoryProfile(state, each, tuple(windows))


def arrays(cache: Sequence[Any]) -> list[mx.array]:
    found = (a for layer in leaves(cache) for _, a in tree_flatten(layer.state))
    return [a for a in found if isinstance(a, mx.array)]


def memory_limit(chosen: int | None) -> int:
    """Bytes that this process may use on the device. Metal recommends a working set. CUDA reports
    its own memory, and how much of it no process uses (mlx 0.32, `device_info`)."""
    if chosen is not None:
        return chosen
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory"):
        own = info.get(name)
        if isinstance(own, int) and own > 0:
            free, reserve = info.get("free_memory"), int(RESERVE * own)
            if isinstance(free, int):
                own = min(own, free + mx.get_active_memory() + mx.get_cache_memory())
                reserve = max(CUDA_RESERVE, reserve)
            return max(int(LEAST_SHARE * own), own - reserve)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(HOST_SHARE * host)


def pool_limit(limit: int) -> int:
    if mx.default_device().type == mx.DeviceType.cpu:
        return 0  # the CPU's allocator keeps none (mlx 0.32, backend/no_gpu/allocator.cpp)
    return min(POOL, int(POOL_SHARE * limit))
