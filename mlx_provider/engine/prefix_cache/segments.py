"""What a node stores, how it is read from a row cache, and how it fills another one.

A `Segment` has keys and values of tokens `[start, stop)`, and can be cut anywhere. A `Snapshot` has
the states and windows after some tokens, and is used as a whole. Layers count as in `layers_of`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...upstream.cache_classes import layers_of
from ..row_cache import Kind, Unstorable, grow_by, kind, kv_arrays, set_arrays, window_attributes
from ..scheduling.ledger import whole_steps
from .tree import ID_BYTES, Node, segment_of

if TYPE_CHECKING:
    from .buffers import RowBuffers

Encoded = list[Any]
"""A value as JSON can hold it: `[tag, ...]`. An array is an index of a separate list."""


@dataclass(frozen=True)
class Segment:
    """Keys and values of some tokens, in all layers that can be cut: tokens `[0, length)` of
    `arrays`, or `[start, start + length)` of the buffers of `row`. Immutable."""

    length: int
    token_bytes: int  # bytes of one token in all these layers
    layout: tuple[tuple[Any, ...], ...]
    """Equal for rows whose segments can be joined. Per layer: its index, then shape and type of
    each of its arrays, which are 2, 6 if quantised, or 0 for a layer without tokens."""
    complete: bool  # whether these are all layers, so that a row can resume at any token
    arrays: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    """Arrays (1, heads, tokens, dim) by layer index: first those of keys, then of values."""
    row: RowBuffers | None = None
    start: int = 0
    doubled_tokens: int = 0
    """Tokens before `start` that are in the row's buffers and in other nodes. They count twice."""

    @property
    def buffers(self) -> int:
        """Number of device buffers that it has, or would have as a copy."""
        return sum(len(arrays) for _, *arrays in self.layout)

    @property
    def kv_bytes(self) -> int:
        return (self.doubled_tokens + self.length) * self.token_bytes

    @property
    def nbytes(self) -> int:
        """With the token ids of its node."""
        return self.kv_bytes + self.length * ID_BYTES

    def slice(self, start: int, stop: int) -> Segment:
        """Its tokens `[start, stop)`, where 0 is its first one: copied, unless it has a `row`."""
        if self.row is not None:
            first = self.start + start
            doubled = 0 if start else self.doubled_tokens
            return replace(self, length=stop - start, start=first, doubled_tokens=doubled)
        views = {i: [a[..., start:stop, :] for a in kv] for i, kv in self.arrays.items()}
        return replace(self, length=stop - start, arrays=copies(views))

    def copy(self) -> Segment:
        """The same tokens, in arrays of its own."""
        return replace(self, arrays=copies(self.views()), row=None, start=0, doubled_tokens=0)

    def views(self) -> Mapping[int, Sequence[Any]]:
        """Its arrays by layer index. Drop them before the row's next pass."""
        if self.row is None:
            return self.arrays
        stop = self.start + self.length
        return {i: self.row.views(i, self.start, stop) for i, *_ in self.layout}


def row_segment(cache: list[Any], length: int) -> tuple[Segment, bool]:
    """Tokens `[0, length)` of a row, in its own arrays, and whether no layer shows more tokens (a
    state never does), so that its states may be those after `length`. Raises `Unstorable`, and
    `ValueError` for fewer tokens."""
    layers: dict[int, list[Any]] = {}
    complete = exact = True
    for i, layer in enumerate(layers_of(cache)):
        which = kind(layer)
        complete = complete and which is Kind.APPEND
        if which is Kind.APPEND:
            layers[i] = kv_arrays(layer)
        if which is not Kind.STATE and (layer.keys is not None or layer.offset):
            exact = exact and layer.offset == length
            if layer.offset < length:
                raise ValueError(f"the cache holds {layer.offset} tokens, not {length}")
    token_bytes = sum(a.nbytes // max(1, a.shape[-2]) for kv in layers.values() for a in kv)
    shapes = {i: [(a.shape[:-2], a.shape[-1], str(a.dtype)) for a in layers[i]] for i in layers}
    layout = tuple((i, *of_layer) for i, of_layer in shapes.items())
    return Segment(length, token_bytes, layout, complete, layers), exact


@dataclass(frozen=True)
class Snapshot:
    """The states and windows of a row cache: attributes of these layers. Immutable."""

    layers: Mapping[int, Encoded]  # by layer index, with indices of `arrays`
    arrays: Sequence[Any]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def buffers(self) -> int:
        return len(self.arrays)


def take_snapshot(cache: list[Any], at: int | None = None) -> Snapshot | None:
    """A copy of the windows and states of a row. `None`: every layer keeps every token. `at`: copy
    them as they were after so many tokens. This must be within the last pass, and only windows
    still have the data for it. Raises `Unstorable`, and `ValueError` if the data is gone."""
    attributes = {}
    for i, layer in enumerate(layers_of(cache)):
        which = kind(layer)
        if which is Kind.WINDOW:
            attributes[i] = window_attributes(layer, at)
        elif which is Kind.STATE:
            if at is not None:
                raise ValueError(f"the state of layer {i} is not that after {at} tokens")
            own = vars(layer)
            # `ArraysCache`: paddings and lengths belong to the batch, not to the row
            attributes[i] = {"cache": own["cache"]} if "cache" in own else own
    arrays: list[Any] = []
    layers = {i: encode(dict(state), arrays) for i, state in attributes.items()}
    return Snapshot(layers, copies({0: arrays})[0]) if layers else None


def encode(value: Any, arrays: list[Any]) -> Encoded:
    """Appends the arrays of the value to `arrays`. Raises `Unstorable` for an unknown type."""
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


def decode(encoded: Encoded, arrays: Sequence[Any]) -> Any:
    """The value that was encoded, with new arrays, to which a row may write."""
    tag, *rest = encoded
    if tag == "array":
        return mx.contiguous(arrays[rest[0]])
    if tag == "value":
        return rest[0]
    if tag == "dict":
        return {k: decode(item, arrays) for k, item in rest}
    items = [decode(item, arrays) for item in rest]
    return items if tag == "list" else tuple(items)


@dataclass
class RowFiller:
    """Fills a row cache: `put` or `put_nodes` in the order of tokens, then `finish`. Only the
    piece that is copied is in memory twice."""

    cache: list[Any]
    length: int  # most tokens for which `finish` is called
    room: int  # capacity after these, in tokens
    states: Collection[int] = ()  # indices of the layers that get the state of a snapshot
    in_place: int = 0
    """First tokens that the other layers have already: a prefix that they share with other rows, or
    all of `length`, in buffers that were taken over. Only later tokens are copied."""

    def __post_init__(self) -> None:
        self._buffers: dict[int, list[Any]] = {}
        layers = enumerate(layers_of(self.cache))
        self._layers = {i: layer for i, layer in layers if i not in self.states}

    def put(self, arrays: Mapping[int, Sequence[Any]], start: int, stop: int, skip: int) -> None:
        """Copy tokens `[start, stop)` of the row, which begin at `skip` in `arrays`, by layer
        index. Raises `ValueError` if these lack a layer, or are of another kind than a layer's."""
        for i, layer in self._layers.items():
            if i not in arrays:
                raise ValueError(f"layer {i} cannot be resumed at token {stop}")
            parts, first = arrays[i], max(start, self.in_place)
            if not parts:
                continue
            if kind(layer) is not Kind.APPEND or len(parts) != (6 if hasattr(layer, "bits") else 2):
                raise ValueError(f"{type(layer).__name__} differs from the stored layer")
            if first >= stop:
                continue
            if i not in self._buffers:
                tokens = self.length - self.in_place
                tokens += _slack(layer, tokens, self.room)
                shapes = [(*part.shape[:-2], tokens, part.shape[-1]) for part in parts]
                pairs = zip(shapes, parts, strict=True)
                self._buffers[i] = [mx.zeros(shape, part.dtype) for shape, part in pairs]
            for buffer, part in zip(self._buffers[i], parts, strict=True):
                piece = part[..., skip + first - start : skip + stop - start, :]
                copy_tokens(piece, buffer, first - self.in_place)
        mx.eval([self._buffers[i] for i in arrays if i in self._buffers])

    def put_nodes(self, path: Sequence[Node], stop: int) -> None:
        """Copy tokens `[0, stop)` of a path. Raises `ValueError` as `put` does."""
        for node in path:
            if node.start < stop:
                arrays = segment_of(node).views()
                self.put(arrays, node.start, min(node.stop, stop), skip=0)

    def finish(self, length: int, snapshot: Snapshot | None) -> list[Any]:
        """The row cache, with tokens `[0, length)` and the states of `snapshot`."""
        for i, layer in self._layers.items():
            buffers, tokens = self._buffers.get(i), length - self.in_place
            if buffers is None:
                if self.in_place:
                    grow_by([layer], max(1, self.room))
                continue
            if not _slack(layer, tokens, self.room):
                buffers = [mx.contiguous(buffer[..., :tokens, :]) for buffer in buffers]
            set_arrays(layer, buffers)
            layer.offset = length
        layers, states = layers_of(self.cache), list[Any]()
        if snapshot is not None:
            for i, encoded in snapshot.layers.items():
                attributes = decode(encoded, snapshot.arrays)
                vars(layers[i]).update(attributes)
                states += [a for _, a in tree_flatten(attributes) if isinstance(a, mx.array)]
        mx.eval(states, list(self._buffers.values()))
        return self.cache


def copies(layers: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """Contiguous copies, which keep no larger buffer alive."""
    made = {i: [mx.contiguous(array) for array in kv] for i, kv in layers.items()}
    mx.eval(made)
    return made


def copy_tokens(piece: Any, buffer: Any, at: int) -> None:
    """Write the tokens of a piece into a buffer, from token `at` on."""
    buffer[..., at : at + piece.shape[-2], :] = piece


def _slack(layer: Any, length: int, room: int) -> int:
    """Capacity in tokens beyond `length`, up to a whole step; 0 if the layer has no steps."""
    return whole_steps(length + max(1, room)) - length if hasattr(layer, "step") else 0
