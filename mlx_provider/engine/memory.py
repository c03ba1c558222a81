"""How many bytes a model's rows take, and how many there are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .room import whole_steps

RECOMMENDED_SHARE = 0.85
"""Share of Metal's recommended working set that we use."""
HOST_SHARE = 0.7
"""Share of physical memory that we use where the device recommends nothing."""


@dataclass(frozen=True)
class MemoryProfile:
    """Cache bytes of one row: fixed state, plus bytes per token up to each window."""

    state_bytes: int
    token_bytes: int
    """Bytes per token of the layers that keep every token."""
    windows: tuple[tuple[int, int], ...] = ()
    """(window in tokens, bytes per token) of the layers that keep only the last ones."""

    @property
    def recurrent(self) -> bool:
        """Whether layers keep a state, which every token changes."""
        return self.state_bytes > 0

    def row_bytes(self, tokens: int) -> int:
        """Bytes allocated for a row of `tokens` tokens."""
        grown = whole_steps(tokens)
        windowed = sum(min(grown, window) * each for window, each in self.windows)
        return self.state_bytes + grown * self.token_bytes + windowed


def profile(cache: Sequence[Any], tokens: int) -> MemoryProfile:
    """Measure a row cache that holds `tokens` tokens (at least one)."""
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
    """Every array that a cache holds."""
    found = (a for layer in leaves(cache) for _, a in tree_flatten(layer.state))
    return [a for a in found if isinstance(a, mx.array)]


def leaves(cache: Sequence[Any]) -> list[Any]:
    """The layers of a row cache, with lists of caches (`CacheList`) opened."""
    found: list[Any] = []
    for layer in cache:
        inner = getattr(layer, "caches", None)
        found.extend([layer] if inner is None else leaves(inner))
    return found


def memory_limit(chosen: int | None) -> int:
    """Bytes that this process may use on the device."""
    if chosen is not None:
        return chosen
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return int(RECOMMENDED_SHARE * recommended)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(HOST_SHARE * host)
