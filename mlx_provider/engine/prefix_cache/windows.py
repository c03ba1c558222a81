"""The state of a sliding window, as the next token sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .layer_kinds import CHUNKED


def window_attributes(layer: Any, at: int | None) -> dict[str, Any]:
    """Cut to what the next token sees after `at` tokens, oldest first."""
    own = dict(vars(layer))
    if layer.keys is None:
        return own
    if at is not None and at < layer.offset:
        own |= _shortened(own, layer.offset - at)
    if own.keys() == CHUNKED:
        used = own["offset"] - own["start_position"]
        return own | {name: own[name][..., :used, :] for name in ("keys", "values")}
    ordered = {name: _in_order(own[name], own) for name in ("keys", "values")}
    return own | ordered | {"_idx": ordered["keys"].shape[2]}


def _shortened(own: Mapping[str, Any], behind: int) -> dict[str, Any]:
    """A window without its newest `behind` tokens, which its last pass has appended in order.

    `RotatingKVCache._update_concat` (mlx-lm 0.32.2) keeps everything that the first of them sees,
    except the oldest token of a full window. Zeros replace that token; the next update drops them
    unseen. Raises `ValueError` if more is missing.
    """
    offset = own["offset"] - behind
    if own.keys() == CHUNKED:
        return {"offset": offset}
    index = own["_idx"] - behind
    gone = min(offset, own["max_size"]) - index
    if gone > 1:
        raise ValueError(f"a window no longer holds its state after {offset} tokens")
    kept = {name: own[name][..., :index, :] for name in ("keys", "values")}
    if gone == 1:
        kept = {name: _blank_first(array, own["keep"]) for name, array in kept.items()}
    return {"offset": offset, "_idx": kept["keys"].shape[2]} | kept


def _blank_first(array: Any, keep: int) -> Any:
    blank = mx.zeros((*array.shape[:-2], 1, array.shape[-1]), dtype=array.dtype)
    return mx.concatenate([array[..., :keep, :], blank, array[..., keep:, :]], axis=2)


def _in_order(array: Any, own: Mapping[str, Any]) -> Any:
    """The first `keep` tokens of a rotating cache, then the newest in order."""
    index, keep, size = own["_idx"], own["keep"], own["max_size"]
    if index < own["offset"] and index < array.shape[2]:  # wrapped: the oldest token is at `index`
        pieces = [array[..., :keep, :], array[..., index:, :], array[..., keep:index, :]]
        array = mx.concatenate(pieces, axis=2)
    else:
        array = array[..., :index, :]
    extra = array.shape[2] - size
    if extra > 0:  # a long prefill chunk leaves more than the window; upstream trims it later
        pieces = [array[..., :keep, :], array[..., keep + extra :, :]]
        array = mx.concatenate(pieces, axis=2)
    return array
