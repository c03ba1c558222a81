"""The layers of a row's cache: which can be cut at any token, their arrays and their capacity.

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

APPEND keeps every token: cut anywhere. WINDOW and STATE count only as a whole. Of an unknown class
every attribute is kept, since upstream's `state` leaves some out; with attributes other than arrays
and plain data, `segments` raises `Unstorable`."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..upstream.cache_classes import SparseKVCache, layers_of
from ..upstream.shared_kv import SharedRow, arrays_of
from .scheduling.ledger import MemoryProfile, whole_steps

KV = frozenset({"keys", "values", "offset"})
QUANTISED = KV | {"group_size", "bits"}
ROTATING = KV | {"keep", "max_size", "_idx"}
CHUNKED = KV | {"chunk_size", "start_position"}


class Unstorable(TypeError):
    """A cache holds something that cannot be stored for another row."""


class Kind(enum.Enum):
    APPEND = "append"
    WINDOW = "window"
    STATE = "state"


def kind(layer: Any) -> Kind:
    """The kind of a layer's cache. Raises `Unstorable` if its state is not accessible."""
    if not hasattr(layer, "__dict__"):
        raise Unstorable(f"{type(layer).__name__} has no attributes to keep")
    if isinstance(layer, SharedRow):
        return Kind.APPEND
    names = vars(layer).keys() - {"step"}  # of growth, not of the state
    if names in (KV, QUANTISED):
        return Kind.APPEND
    return Kind.WINDOW if names in (ROTATING, CHUNKED) else Kind.STATE


def strictest(cache: list[Any]) -> Kind:
    """STATE, else WINDOW, if any layer is of that kind. APPEND also if no row is stored."""
    try:
        kinds = {kind(layer) for layer in layers_of(cache)}
    except Unstorable:
        return Kind.APPEND
    return next((k for k in (Kind.STATE, Kind.WINDOW) if k in kinds), Kind.APPEND)


def append_layers(cache: Sequence[Any]) -> dict[int, Any]:
    """The layers of a row cache that keep every token, by layer index."""
    return {i: layer for i, layer in enumerate(layers_of(cache)) if kind(layer) is Kind.APPEND}


def kv_arrays(layer: Any) -> list[Any]:
    """Keys, then values of an APPEND layer, in token order, of at least `offset` tokens."""
    return arrays_of(layer) if isinstance(layer, SharedRow) else own_arrays(layer)


def own_arrays(layer: Any) -> list[Any]:
    """Like `kv_arrays`, but without those of a shared prefix. Empty: the layer has no tokens."""
    if layer.keys is None:
        return []
    both = (layer.keys, layer.values)
    return [a for part in both for a in (part if isinstance(part, (tuple, list)) else (part,))]


def set_arrays(layer: Any, arrays: Sequence[Any]) -> None:
    """The reverse of `own_arrays`. No arrays: nothing changes."""
    half = len(arrays) // 2
    if half:
        keys, values = tuple(arrays[:half]), tuple(arrays[half:])
        layer.keys, layer.values = (keys[0], values[0]) if half == 1 else (keys, values)


def extend(array: Any, tokens: int) -> Any:
    """A copy with zeros for so many tokens at its end."""
    shape = (*array.shape[:-2], tokens, array.shape[-1])
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=-2)


def window_attributes(layer: Any, at: int | None) -> dict[str, Any]:
    """The attributes of a WINDOW layer as they were after `at` tokens (`None`: now), with tokens in
    order, the oldest first. Raises `ValueError` if the layer has lost some of that."""
    own = dict(vars(layer))
    if layer.keys is None:
        return own
    if at is not None and at < layer.offset:
        own |= _without_newest(own, layer.offset - at)
    if own.keys() == CHUNKED:
        used = own["offset"] - own["start_position"]
        return own | {name: own[name][..., :used, :] for name in ("keys", "values")}
    ordered = {name: _in_order(own[name], own) for name in ("keys", "values")}
    return own | ordered | {"_idx": ordered["keys"].shape[2]}


def _without_newest(own: Mapping[str, Any], behind: int) -> dict[str, Any]:
    """What changes if the newest `behind` tokens of a window go. They must be fewer than its last
    pass has appended: `RotatingKVCache._update_concat` (mlx-lm 0.32.2) keeps everything that the
    first token of a pass sees. Raises `ValueError` if some of that is missing."""
    offset = own["offset"] - behind
    if own.keys() == CHUNKED:
        return {"offset": offset}
    index = own["_idx"] - behind
    if index < min(offset, own["max_size"]):
        raise ValueError(f"a window no longer holds its state after {offset} tokens")
    kept = {name: own[name][..., :index, :] for name in ("keys", "values")}
    return {"offset": offset, "_idx": kept["keys"].shape[2]} | kept


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


def grow_by(cache: Sequence[Any], tokens: int) -> None:
    """Let layers that keep every token allocate capacity for `tokens` more at their next
    allocation. Upstream allocates whole steps of `step` tokens (mlx_lm/models/cache.py 0.32.2,
    `KVCache.update_and_fetch`) and writes in place while the capacity lasts."""
    for layer in layers_of(cache):
        can_grow = hasattr(layer, "step") and hasattr(layer, "__dict__")
        if can_grow and (isinstance(layer, SparseKVCache) or kind(layer) is Kind.APPEND):
            layer.step = whole_steps(tokens)


def profile(cache: Sequence[Any]) -> MemoryProfile:
    """Measure the bytes of a row cache, which must hold at least one token."""
    state, each, windows = 0, 0, []
    for layer in layers_of(cache):
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
    found = (a for layer in layers_of(cache) for _, a in tree_flatten(layer.state))
    return [a for a in found if isinstance(a, mx.array)]
