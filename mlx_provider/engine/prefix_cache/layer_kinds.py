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

Immutable arrays in few buffers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

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
        """Copies of tokens `start .. stop` of the token axis (-2)."""
        stacks = tuple(mx.contiguous(stack[..., start:stop, :]) for stack in self.stacks)
        mx.eval(stacks)
        return ArrayPack(stacks, self.places)

    @property
    def buffers(self) -> int:
        return len(self.stacks)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)
