"""Merges row caches into batch caches of mlx-lm, and extracts rows again.

Upstream's methods (mlx_lm/models/cache.py 0.32.2) copy too much and wait for the device:
`BatchKVCache.merge` reserves no capacity, `extract` copies a complete row, and `filter` reads the
paddings from the device in every layer."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .cache_classes import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    SparseKVCache,
    by_layer,
    cached_length,
    layers_of,
)
from .shared_kv import SharedBatchKV, SharedKV, prefix_of, start

RowCache = list[Any]
PLAIN = (KVCache, SparseKVCache, SharedKV)
"""Classes that keep all appended tokens."""


def mergeable(cache: Sequence[Any]) -> bool:
    """Whether upstream has a batch cache for every layer."""
    return all(hasattr(type(layer), "merge") for layer in layers_of(cache))


def merge_rows(rows: Sequence[RowCache]) -> RowCache:
    """One batch cache per layer, not evaluated. Layers whose rows have the same offsets share one
    array of offsets, which is then computed and compared once."""
    merge = partial(_merge, dict[tuple[int, ...], mx.array]())
    return [by_layer(merge, *layers) for layers in zip(*rows, strict=True)]


def rows_of(batch: Sequence[Any], indices: Iterable[int]) -> list[RowCache]:
    """Rows of a merged cache, not evaluated. Keys and values are views, except those of wrapped
    windows; a write to a row does not change the batch."""
    rings = [layer for layer in batch if isinstance(layer, BatchRotatingKVCache)]
    mx.eval([[ring.left_padding, ring.offset] for ring in rings])  # one wait, not one per layer
    return [[by_layer(partial(_row, index), layer) for layer in batch] for index in indices]


def counting_alike(batch: Iterable[Any]) -> list[list[Any]]:
    """The layers of a merged cache, grouped by the array of offsets that they share."""
    found: dict[int, list[Any]] = {}
    for layer in batch:
        if isinstance(getattr(layer, "offset", None), mx.array):
            found.setdefault(id(layer.offset), []).append(layer)
    return list(found.values())


def columns(cache: Any) -> int:
    """Columns of a layer: tokens of the longest row, with padding and those that left a window."""
    if isinstance(cache.offset, mx.array):
        return int(getattr(cache, "_offset", cache._idx))
    return cached_length(cache)


def _merge(offsets: dict[tuple[int, ...], mx.array], *rows: Any) -> Any:
    plain = type(rows[0]) in PLAIN and all(row.offset for row in rows)
    batch = _merged_kv(rows) if plain else type(rows[0]).merge(rows)
    # caches of other classes change their offsets in place and cannot share them
    if type(batch) in (BatchKVCache, BatchRotatingKVCache, SharedBatchKV):
        counts = tuple(row.offset for row in rows)
        batch.offset = offsets.setdefault(counts, mx.array(counts))
    return batch


def _merged_kv(rows: Sequence[KVCache]) -> BatchKVCache:
    """Rows with at least one token each, and capacity for the next. The caller sets the offsets.
    `skipped` of the result: for each row, the number of tokens that it lacks. Either all rows have
    the same shared prefix, or none has one."""
    longest, prefix = max(map(cached_length, rows)), prefix_of(rows[0])
    paddings = [longest - cached_length(row) for row in rows]
    batch = BatchKVCache(paddings) if prefix is None else SharedBatchKV(prefix, paddings)
    batch.skipped = [row.offset - cached_length(row) for row in rows]
    room = -(-(longest + 1) // batch.step) * batch.step
    batch.keys = _pad([row.keys for row in rows], rows, longest, room)
    batch.values = _pad([row.values for row in rows], rows, longest, room)
    batch._idx = longest
    return batch


def _pad(arrays: Sequence[mx.array], rows: Sequence[KVCache], longest: int, room: int) -> mx.array:
    """(rows, heads, room, dim): the tokens of each row end at column `longest`."""
    _, heads, _, dim = arrays[0].shape
    together = mx.zeros((len(rows), heads, room, dim), dtype=arrays[0].dtype)
    for i, (array, row) in enumerate(zip(arrays, rows, strict=True)):
        count = cached_length(row)
        together[i : i + 1, :, longest - count : longest] = array[..., :count, :]
    return together


def _row(index: int, layer: Any) -> Any:
    if isinstance(layer, ArraysCache):
        state = type(layer)(len(layer.cache))
        state.cache = [None if a is None else a[index : index + 1] for a in layer.cache]
        return state
    if type(layer) in (BatchKVCache, SharedBatchKV) and layer.keys is not None:
        return _kv_row(layer, index)
    return layer.extract(index)


def _kv_row(batch: BatchKVCache, index: int) -> KVCache:
    paddings: list[int] = batch.left_padding.tolist()
    first, skipped = paddings[index], getattr(batch, "skipped", {index: 0})[index]
    prefix = prefix_of(batch)
    row = SparseKVCache(skipped) if skipped and prefix is None else KVCache()
    if prefix is not None:
        start(row, prefix)
    row.keys = batch.keys[index : index + 1, :, first : batch._idx]
    row.values = batch.values[index : index + 1, :, first : batch._idx]
    row.offset = batch._idx - first + skipped
    return row
