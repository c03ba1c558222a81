"""What each layer of a row cache allows: cut at any token, or keep whole.

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
from typing import Any

from ...upstream.shared_kv import SharedRow, arrays_of
from ..memory import leaves

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
    if isinstance(layer, SharedRow):
        return arrays_of(layer)
    if layer.keys is None:
        return []
    both = (layer.keys, layer.values)
    return [a for each in both for a in (each if isinstance(each, (tuple, list)) else (each,))]
