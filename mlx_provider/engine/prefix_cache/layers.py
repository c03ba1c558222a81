"""The layers of a row cache: which can be cut at any token, and snapshots of those that cannot.

A layer is known by its instance attributes (mlx-lm 0.32.2 models/cache.py, mlx-vlm 0.7.10
models/cache.py), because a subclass that adds an attribute has state of its own:

| attributes                                     | upstream                     | kind   |
|------------------------------------------------|------------------------------|--------|
| keys values offset                             | KVCache, ConcatenateKVCache  | APPEND |
| keys values offset group_size bits             | QuantizedKVCache             | APPEND |
| `SharedRow`                                    |                              | APPEND |
| keys values offset keep max_size _idx          | RotatingKVCache              | WINDOW |
| keys values offset chunk_size start_position   | ChunkedKVCache               | WINDOW |
| cache …                                        | ArraysCache                  | STATE  |
| caches                                         | CacheList                    | opened |
| anything else                                  |                              | STATE  |

APPEND keeps every token: cut anywhere. WINDOW keeps every token until it wraps, afterwards it
counts only as a whole, like STATE. Of an unknown class every attribute is kept, since upstream's
`state` leaves some out; a class with attributes other than arrays and plain data is not stored.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...upstream.shared_kv import SharedRow, arrays_of
from ..memory import leaves

KV = frozenset({"keys", "values", "offset"})
QUANTISED = KV | {"group_size", "bits"}
ROTATING = KV | {"keep", "max_size", "_idx"}
CHUNKED = KV | {"chunk_size", "start_position"}
Encoded = list[Any]
"""JSON-able form of a value: `[tag, ...]`. Arrays are indices into a pack."""


class Unstorable(TypeError):
    """A cache holds something that cannot be stored for another row."""


class Kind(enum.Enum):
    APPEND = "append"
    WINDOW = "window"
    STATE = "state"


def kind(layer: Any) -> Kind:
    """Raises `Unstorable` if the layer's state is not accessible."""
    if not hasattr(layer, "__dict__"):
        raise Unstorable(f"{type(layer).__name__} has no attributes to keep")
    if isinstance(layer, SharedRow):
        return Kind.APPEND
    names = vars(layer).keys() - {"step"}  # of growth, not of the state
    if names in (KV, QUANTISED):
        return Kind.APPEND
    return Kind.WINDOW if names in (ROTATING, CHUNKED) else Kind.STATE


def strictest(cache: list[Any]) -> Kind:
    """Raises `Unstorable`."""
    kinds = {kind(layer) for layer in leaves(cache) if layer is not None}
    return next((k for k in (Kind.STATE, Kind.WINDOW) if k in kinds), Kind.APPEND)


def unwrapped(layer: Any) -> bool:
    """Whether a window still holds all tokens from the first."""
    if layer.keys is None:
        return True
    if vars(layer).keys() == CHUNKED:
        return bool(layer.start_position == 0)
    return bool(layer.offset <= layer.max_size and vars(layer)["_idx"] == layer.offset)


def kv_arrays(layer: Any) -> list[Any]:
    """Keys and values in token order, of at least `offset` tokens."""
    return arrays_of(layer) if isinstance(layer, SharedRow) else own_arrays(layer)


def own_arrays(layer: Any) -> list[Any]:
    """The same without those of a common prefix."""
    if layer.keys is None:
        return []
    both = (layer.keys, layer.values)
    return [a for each in both for a in (each if isinstance(each, (tuple, list)) else (each,))]


def set_arrays(layer: Any, arrays: Sequence[Any]) -> None:
    half = len(arrays) // 2
    if half:
        keys, values = tuple(arrays[:half]), tuple(arrays[half:])
        layer.keys, layer.values = (keys[0], values[0]) if half == 1 else (keys, values)


@dataclass(frozen=True)
class ArrayPack:
    """Metal limits the number of live buffers, not only their bytes (mlx #3849, mlx-lm #1672), so
    arrays of equal shape and dtype are stacked in one. A pack keeps no larger source buffer
    alive."""

    stacks: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> ArrayPack:
        groups: dict[tuple[Any, ...], list[Any]] = {}
        order: dict[tuple[Any, ...], int] = {}
        places: list[tuple[int, int]] = []
        for array in arrays:
            kind = (*array.shape, str(array.dtype))
            group = groups.setdefault(kind, [])
            places.append((order.setdefault(kind, len(order)), len(group)))
            group.append(array)
        # a stack of one array is a view, hence `contiguous`
        stacks = tuple(mx.contiguous(mx.stack(group)) for group in groups.values())
        mx.eval(stacks)
        return cls(stacks, tuple(places))

    @classmethod
    def loose(cls, arrays: Sequence[Any]) -> ArrayPack:
        return cls(
            tuple(array[None] for array in arrays), tuple((i, 0) for i in range(len(arrays)))
        )

    def __getitem__(self, index: int) -> Any:
        """A lazy view. Writing to it in place does not change the pack."""
        stack, row = self.places[index]
        return self.stacks[stack][row : row + 1].squeeze(0)  # an index alone copies (MLX 0.32.4)

    def cut(self, start: int, stop: int) -> ArrayPack:
        """Copies of tokens `[start, stop)` of the token axis (-2)."""
        stacks = tuple(mx.contiguous(stack[..., start:stop, :]) for stack in self.stacks)
        mx.eval(stacks)
        return ArrayPack(stacks, self.places)

    @property
    def buffers(self) -> int:
        return len(self.stacks)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)


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
