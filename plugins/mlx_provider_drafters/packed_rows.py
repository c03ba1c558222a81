"""Rows of different lengths in one pass, each with its own cache and some tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_provider.families.caches import append_behind, visible_behind
from mlx_provider.records import Parts, Run

Stale = Sequence[mx.array | None]
"""Per row: rejected tokens at the end of its cache, (1,) int32, not read by the host. The row's one
new token overwrites them. `None`: none."""


def packed_rows(
    caches: Sequence[list[Any]], counts: Sequence[int], positions: mx.array, stale: Stale
) -> list[Any]:
    """The rows' caches in the form for the model, layer by layer. The model treats each of a row's
    `counts` tokens as a row. `positions`: (tokens,) int32."""
    edges = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
    places = [slice(*edge) for edge in edges]
    return [PackedLayer(layer, places, positions, stale) for layer in zip(*caches, strict=True)]


class PackedLayer:
    """One layer. Attention must be patched (`mlx_provider.families.attention`)."""

    def __init__(
        self, caches: Sequence[Any], places: Sequence[slice], offset: mx.array, stale: Stale
    ) -> None:
        self.offset = offset
        self._stale = stale
        self._runs = [
            Run(cache, place, turned=True) for cache, place in zip(caches, places, strict=True)
        ]

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> list[Any]:
        """One mask per row. `N`: tokens per row for the model, always 1."""
        return [
            run.cache.make_mask(_count(run), *args, **kwargs)
            if stale is None
            else visible_behind(run.cache, run.cache.offset - stale, kwargs.get("window_size"))
            for run, stale in zip(self._runs, self._stale, strict=True)
        ]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Append (tokens, heads, 1, D): to each row its tokens, as (1, heads, tokens, D)."""
        pairs = [
            _append(run, stale, keys[run.rows].swapaxes(0, 2), values[run.rows].swapaxes(0, 2))
            for run, stale in zip(self._runs, self._stale, strict=True)
        ]
        all_keys, all_values = (list(each) for each in zip(*pairs, strict=True))
        return Parts(all_keys, self._runs), Parts(all_values, self._runs)


def _append(
    run: Run, stale: mx.array | None, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    if stale is not None:
        return append_behind(run.cache, keys, values, stale)
    found: tuple[mx.array, mx.array] = run.cache.update_and_fetch(keys, values)
    return found


def _count(run: Run) -> int:
    return int(run.rows.stop - run.rows.start)
