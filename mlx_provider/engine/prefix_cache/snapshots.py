"""The state of a sliding window, as the next token sees it.

Snapshots: states that cannot be cut, stored for one position of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..memory import leaves
from .layer_kinds import CHUNKED, ArrayPack, Kind, Unstorable, kind


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


Encoded = list[Any]
"""JSON-able form of a value: `[tag, ...]`. Arrays are indices into a pack."""


@dataclass(frozen=True)
class Snapshot:
    """Instance attributes of some layers of a row cache, by leaf index. Immutable."""

    layers: Mapping[int, Encoded]
    pack: ArrayPack
    inside: bool = False
    """Taken inside a message, for prompts that leave this one there."""

    @classmethod
    def of(cls, attributes: Mapping[int, Mapping[str, Any]]) -> Snapshot:
        """Copy and evaluate. Raises `Unstorable` for values other than arrays and plain data."""
        arrays: list[Any] = []
        layers = {leaf: encode(dict(each), arrays) for leaf, each in attributes.items()}
        return cls(layers, ArrayPack.of(arrays))

    def attributes(self, leaf: int) -> dict[str, Any]:
        decoded: dict[str, Any] = decode(self.layers[leaf], self.pack)
        return decoded

    @property
    def nbytes(self) -> int:
        return self.pack.nbytes

    @property
    def buffers(self) -> int:
        return self.pack.buffers


def take_snapshot(cache: list[Any], at: int | None = None) -> Snapshot | None:
    """Windows and states of a row. `None` if every layer keeps every token.

    `at`: their values after that many tokens, at the beginning of the last pass (of several tokens)
    or within it; only windows still have the data for this. A window that has not wrapped is
    included, as it may wrap before the row is stored. Raises `Unstorable`, and `ValueError` if the
    data for `at` is gone.
    """
    attributes = {}
    for leaf, layer in enumerate(leaves(cache)):
        which = kind(layer) if layer is not None else Kind.APPEND
        if which is Kind.WINDOW:
            attributes[leaf] = window_attributes(layer, at)
        elif which is Kind.STATE:
            if at is not None:
                raise ValueError(f"the state of layer {leaf} is not that after {at} tokens")
            own = vars(layer)
            # `ArraysCache`: paddings and lengths belong to the batch, not to the row
            attributes[leaf] = {"cache": own["cache"]} if "cache" in own else own
    return Snapshot.of(attributes) if attributes else None


def encode(value: Any, arrays: list[Any]) -> Encoded:
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    if isinstance(value, (list, tuple)):
        tag = "list" if isinstance(value, list) else "tuple"
        return [tag, *(encode(item, arrays) for item in value)]
    if isinstance(value, dict) and all(isinstance(k, (str, int)) for k in value):
        return ["dict", *([k, encode(item, arrays)] for k, item in value.items())]
    raise Unstorable(f"a cache that holds a {type(value).__name__} cannot be kept")


def decode(encoded: Encoded, pack: ArrayPack) -> Any:
    """The arrays of the result share no memory with the pack after evaluation."""
    tag, *rest = encoded
    if tag == "array":
        return mx.contiguous(pack[rest[0]])
    if tag == "value":
        return rest[0]
    if tag == "dict":
        return {k: decode(item, pack) for k, item in rest}
    items = [decode(item, pack) for item in rest]
    return items if tag == "list" else tuple(items)
