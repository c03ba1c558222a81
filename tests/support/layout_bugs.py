"""Errors of batching that the probe must find, each put where rows are merged, grouped or mixed."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from mlx_provider.engine.execution import batch_layout, grouped_kv
from mlx_provider.engine.execution.grouped_kv import ChunkKV, GroupedKV
from mlx_provider.upstream.recurrent import StateRun
from replaced import Patch, wrap

Bug = Callable[[Patch], None]


def no_mask(patch: Patch) -> None:
    """Padding is attended to."""
    make = BatchKVCache.make_mask

    def masked(cache: Any, count: int, **more: Any) -> Any:
        return None if count == 1 else make(cache, count, **more)

    patch.setattr(BatchKVCache, "make_mask", masked)


def merging(change: Callable[[Any], None]) -> Bug:
    """What merged rows are changed to, layer by layer."""

    def changed(merge: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def merged(rows: Sequence[Any]) -> list[Any]:
            batch = merge(rows)
            for layer in batch:
                change(layer)
            return batch

        return merged

    return lambda patch: wrap(patch, batch_layout, "merge_rows", changed)


def offset_of_all(cache: Any) -> None:
    cache.offset = cache.offset + 1


def offset_of_one(cache: Any) -> None:
    cache.offset = cache.offset + mx.array([1] + [0] * (cache.offset.size - 1))


def offset_is_the_longest(cache: Any) -> None:
    cache.offset = cache.offset + cache.left_padding


def first_token_hidden(cache: Any) -> None:
    cache.left_padding = cache.left_padding + (cache.left_padding > 0)


def one_token_of_padding_seen(cache: Any) -> None:
    cache.left_padding = cache.left_padding - (cache.left_padding > 0)


def keys_shifted(cache: Any) -> None:
    cache.keys[:1] = mx.roll(cache.keys[:1], 1, 2)


def rows_swapped(cache: Any) -> None:
    cache.keys, cache.values = cache.keys[::-1], cache.values[::-1]


def values_swapped(cache: Any) -> None:
    cache.values = cache.values[::-1]


def last_token_lost(cache: Any) -> None:
    last = int(mx.max(cache.offset + cache.left_padding)) - 1
    cache.keys[:, :, last : last + 1] = 0


def rows_share_keys(cache: Any) -> None:
    cache.keys = mx.broadcast_to(cache.keys[-1:], cache.keys.shape)


def leaves_without_its_last_token(patch: Patch) -> None:
    def shorter(extract: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def extracted(batch: Sequence[Any], indices: Iterable[int]) -> list[Any]:
            rows = extract(batch, indices)
            for layer in itertools.chain(*rows):
                layer.offset -= 1
            return rows

        return extracted

    wrap(patch, batch_layout, "rows_of", shorter)


def another_row_leaves(patch: Patch) -> None:
    def next_one(extract: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def extracted(batch: Sequence[Any], indices: Iterable[int]) -> list[Any]:
            size = batch[0].left_padding.size
            return extract(batch, [(index + 1) % size for index in indices])

        return extracted

    wrap(patch, batch_layout, "rows_of", next_one)


def comes_back_without_its_last_token(patch: Patch) -> None:
    add, known = batch_layout.Layout.add, set()

    def added(layout: batch_layout.Layout, row: Any, cache: list[Any]) -> None:
        for layer in cache if row in known and layout.name != "solo" else ():
            layer.offset -= 1
        known.add(row)
        add(layout, row, cache)

    patch.setattr(batch_layout.Layout, "add", added)


def groups_share_offsets(patch: Patch) -> None:
    def offset(cache: GroupedKV) -> mx.array:
        first = mx.array(cache.parts[0].offset).reshape(-1)[:1]
        return mx.broadcast_to(first, (sum(cache.sizes),))

    patch.setattr(GroupedKV, "offset", property(offset))


def groups_share_masks(patch: Patch) -> None:
    make = GroupedKV.make_mask

    def masks(cache: GroupedKV, *args: Any, **kwargs: Any) -> list[Any]:
        made = make(cache, *args, **kwargs)
        return [None for _ in made[:-1]] + made[-1:]

    patch.setattr(GroupedKV, "make_mask", masks)


LAYOUT_BUGS = {
    "padding seen": no_mask,
    "offset of all rows": merging(offset_of_all),
    "offset of one row": merging(offset_of_one),
    "offset of the longest row": merging(offset_is_the_longest),
    "first token hidden": merging(first_token_hidden),
    "one token of padding seen": merging(one_token_of_padding_seen),
    "keys of one row shifted": merging(keys_shifted),
    "rows swapped": merging(rows_swapped),
    "values swapped": merging(values_swapped),
    "last token lost": merging(last_token_lost),
    "rows share keys": merging(rows_share_keys),
    "leaves without its last token": leaves_without_its_last_token,
    "another row leaves": another_row_leaves,
    "comes back without its last token": comes_back_without_its_last_token,
    "groups share offsets": groups_share_offsets,
    "a group without its mask": groups_share_masks,
}


def chunk_method(name: str, changed: Callable[..., Any]) -> Bug:
    """`changed` stands for a method of `ChunkKV`, which is its first argument."""

    def bug(patch: Patch) -> None:
        original = getattr(ChunkKV, name)
        patch.setattr(ChunkKV, name, lambda *args, **more: changed(original, *args, **more))

    return bug


def chunk_ends_early(update: Any, cache: ChunkKV, keys: mx.array, values: mx.array) -> Any:
    fetched = update(cache, keys, values)
    cache.inner.offset -= 1
    return fetched


def chunk_turned(update: Any, cache: ChunkKV, keys: mx.array, values: mx.array) -> Any:
    return update(cache, keys[::-1], values[::-1])


def chunk_at(position: Callable[[int, int], list[int]]) -> Bug:
    """position: (tokens before the chunk, tokens of it) -> what they are taken to stand at."""

    def bug(patch: Patch) -> None:
        def moved(cache: ChunkKV) -> mx.array:
            return mx.array(position(cache.inner.offset, cache.tokens))

        patch.setattr(ChunkKV, "offset", property(moved))

    return bug


def sees(more: int | None) -> Bug:
    """Each token of a chunk sees so many too many; `None`: all of the chunk."""

    def mask(make: Any, cache: ChunkKV, *args: Any, **kwargs: Any) -> Any:
        if more is None:
            return None
        seen = cache.inner.offset + 1 + more + mx.arange(cache.tokens)
        return mx.arange(cache.inner.offset + cache.tokens) < seen[:, None]

    return chunk_method("make_mask", mask)


CHUNK_BUGS = {
    "a chunk's last token missing": chunk_method("update_and_fetch", chunk_ends_early),
    "a chunk's tokens turned": chunk_method("update_and_fetch", chunk_turned),
    "a chunk a position too late": chunk_at(lambda at, count: list(range(at + 1, at + count + 1))),
    "a chunk at one position": chunk_at(lambda at, count: [at] * count),
    "a chunk sees its end": sees(None),
    "a chunk sees a token ahead": sees(1),
    "a chunk does not see itself": sees(-1),
}


def window_moved(by: int) -> Bug:
    def bug(patch: Patch) -> None:
        make = BatchRotatingKVCache.make_mask

        def moved(cache: Any, count: int, window_size: int | None = None, **more: Any) -> Any:
            return make(cache, count, (window_size or cache.max_size) + by, **more)

        patch.setattr(BatchRotatingKVCache, "make_mask", moved)

    return bug


def ring_from_another_place(patch: Patch) -> None:
    """Rows are merged as their rings lie, not in order of their tokens."""
    patch.setattr(RotatingKVCache, "_temporal_order", lambda cache, array: array)


def states_shared(patch: Patch) -> None:
    merge = ArraysCache.merge.__func__

    def merged(cls: Any, caches: Sequence[Any]) -> Any:
        return merge(cls, [caches[0] for _ in caches])

    patch.setattr(ArraysCache, "merge", classmethod(merged))


def states_stay_behind(patch: Patch) -> None:
    """What groups computed together is lost when one of them changes."""
    patch.setattr(batch_layout, "split", lambda together, caches, sizes: None)


def states_of_groups_swapped(patch: Patch) -> None:
    def turned(stack: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def stacked(states: Sequence[Any], sizes: Sequence[int]) -> mx.array:
            return mx.roll(stack(states, sizes), 1, 0)

        return stacked

    wrap(patch, grouped_kv, "_stack", turned)


OTHER_BUGS = {
    "window a token short": ("gemma3_text", window_moved(-1)),
    "rings not in order": ("gemma3_text", ring_from_another_place),
    "states shared": ("qwen3_5_text", states_shared),
    "states stay behind": ("qwen3_5_text", states_stay_behind),
    "states of groups swapped": ("qwen3_5_text", states_of_groups_swapped),
}


def state_run(changed: Callable[[StateRun], StateRun]) -> Bug:
    """`changed` gives what a recurrent layer takes for a chunk's states."""

    def bug(patch: Patch) -> None:
        def runs(*args: Any, **more: Any) -> StateRun:
            run = StateRun(*args, **more)
            return changed(run) if run.turned else run

        patch.setattr(grouped_kv, "StateRun", runs)

    return bug


STATE_BUGS = {
    "a chunk's state forgotten": state_run(lambda run: replace(run, cache=deepcopy(run.cache))),
    "a chunk's tokens apart": state_run(lambda run: replace(run, turned=False)),
    "a chunk of other rows": state_run(
        lambda run: replace(run, rows=slice(run.rows.start - 1, run.rows.stop - 1))
    ),
}
