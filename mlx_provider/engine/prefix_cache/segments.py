"""Segments and snapshots: what is copied out of a row cache and put into another.

A segment has keys and values of consecutive tokens. A snapshot has the states and windows of one
position, which cannot be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...upstream.cache_lists import leaves
from ..row_cache import (
    ROTATING,
    Kind,
    Unstorable,
    grow_by,
    kind,
    kv_arrays,
    set_arrays,
    unwrapped,
    window_attributes,
)
from ..sizes import whole_steps
from .tree import ID_BYTES

if TYPE_CHECKING:
    from .buffers import RowBuffers

Encoded = list[Any]
"""JSON-able form of a value: `[tag, ...]`. Arrays are indices into a pack."""


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

    @cached_property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)


@dataclass(frozen=True)
class Snapshot:
    """Instance attributes of some layers of a row cache, by leaf index. Immutable."""

    layers: Mapping[int, Encoded]
    pack: ArrayPack

    @property
    def nbytes(self) -> int:
        return self.pack.nbytes

    @property
    def buffers(self) -> int:
        return self.pack.buffers


def take_snapshot(cache: list[Any], at: int | None = None) -> Snapshot | None:
    """Windows and states of a row. `None` if every layer keeps every token. `at`: their values
    after that many tokens, within the last pass of several tokens; only windows still have the data
    for this. A window that has not wrapped is included, as it may wrap before the row is stored.
    Raises `Unstorable`, and `ValueError` if the data for `at` is gone."""
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
    arrays: list[Any] = []
    layers = {leaf: encode(dict(each), arrays) for leaf, each in attributes.items()}
    return Snapshot(layers, ArrayPack.of(arrays)) if layers else None


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


EMPTY = ArrayPack((), ())


@dataclass(frozen=True)
class Segment:
    """Immutable tokens of all layers that can be cut, in arrays of its own or in a row's buffers.

    It holds tokens `[0, length)` of `pack`, or `[start, start + length)` of `held`.
    """

    length: int
    token_bytes: int
    layers: tuple[tuple[int, int], ...]
    """(leaf index, number of its arrays): 2, 6 if quantised, 0 for a layer without tokens."""
    pack: ArrayPack = EMPTY
    held: RowBuffers | None = None
    start: int = 0

    @property
    def buffers(self) -> int:
        """Device buffers that it has, or would have on its own."""
        return self.pack.buffers if self.held is None else sum(count for _, count in self.layers)

    @property
    def stored(self) -> int:
        return self.length * self.token_bytes

    @property
    def nbytes(self) -> int:
        return self.length * (self.token_bytes + ID_BYTES)

    def slice(self, start: int, stop: int) -> Segment:
        """Tokens `[start, stop)`, copied unless they are in a row's buffers."""
        if self.held is not None:
            return replace(self, length=stop - start, start=self.start + start)
        return replace(self, length=stop - start, pack=self.pack.cut(start, stop))

    def copied(self) -> Segment:
        pack = ArrayPack.of([a for each in self.arrays().values() for a in each])
        return replace(self, pack=pack, held=None, start=0)

    def arrays(self) -> dict[int, list[Any]]:
        """Arrays (1, heads, length, dim) by leaf index: first those of keys, then of values."""
        if self.held is not None:
            stop = self.start + self.length
            return {leaf: self.held.arrays(leaf, self.start, stop) for leaf, _ in self.layers}
        places = iter(range(len(self.pack.places)))
        return {x: [self.pack[i] for i in islice(places, count)] for x, count in self.layers}


@dataclass(frozen=True)
class RowParts:
    """The tokens `[0, length)` of a row cache, as far as its layers can be cut."""

    length: int
    layers: Mapping[int, list[Any]]
    """Arrays in token order, by leaf index: of layers that keep every token, and of windows that
    have not wrapped."""
    windows: frozenset[int]
    """Those of the latter."""
    complete: bool
    exact: bool
    """Whether no layer holds more than `length` tokens, so that its state is a valid snapshot."""

    def stored(self, *, complete: bool) -> RowParts:
        """What segments of a path hold: windows only if the whole path is complete."""
        kept = {i: x for i, x in self.layers.items() if complete or i not in self.windows}
        return replace(self, layers=kept, complete=complete)

    def cut(self, start: int, stop: int, held: RowBuffers | None = None) -> Segment:
        """Tokens `[start, stop)`: copied, unless they stay in the row's buffers (`held`)."""
        segment = Segment(stop - start, self.token_bytes, self.shape)
        if held is not None:
            return replace(segment, held=held, start=start)
        views = [a[..., start:stop, :] for each in self.layers.values() for a in each]
        return replace(segment, pack=ArrayPack.of(views))

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        return tuple((leaf, len(each)) for leaf, each in self.layers.items())

    @property
    def token_bytes(self) -> int:
        arrays = [a for each in self.layers.values() for a in each]
        return sum(a.nbytes // max(1, a.shape[-2]) for a in arrays)

    @property
    def layout(self) -> tuple[Any, ...]:
        """Equal for rows whose segments can be joined."""
        return tuple(
            (leaf, *((a.shape[:-2], a.shape[-1], str(a.dtype)) for a in each))
            for leaf, each in self.layers.items()
            if leaf not in self.windows
        )


def row_parts(cache: list[Any], length: int) -> RowParts:
    """Raises `Unstorable`, or `ValueError` if the cache holds fewer tokens."""
    layers: dict[int, list[Any]] = {}
    windows = set[int]()
    complete = exact = True
    for leaf, layer in enumerate(leaves(cache)):
        if layer is None:
            layers[leaf] = []
            continue
        which = kind(layer)
        if which is Kind.STATE:
            complete = False
            continue
        if layer.keys is not None or layer.offset:
            exact = exact and layer.offset == length
            if layer.offset < length:
                raise ValueError(f"the cache holds {layer.offset} tokens, not {length}")
        if which is Kind.APPEND or unwrapped(layer):
            layers[leaf] = kv_arrays(layer)
            windows |= {leaf} if which is Kind.WINDOW else set()
        else:
            complete = False
    return RowParts(length, layers, frozenset(windows), complete, exact)


class RowFiller:
    """Fills a fresh row cache piece by piece, which needs no other memory than that of a piece."""

    def __init__(
        self,
        cache: list[Any],
        length: int,
        room: int,
        states: Collection[int] = (),
        in_place: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`length`: most tokens. `room`: capacity for more. `states`: leaves that get the state of
        a snapshot. `in_place`: tokens that some layers hold already, by leaf index."""
        self._cache = cache
        self._length = length
        self._room = room
        self._in_place = in_place
        self._buffers: dict[int, list[Any]] = {}
        self._layers = {i: leaf for i, leaf in enumerate(leaves(cache)) if i not in states}

    def put(self, arrays: Mapping[int, Sequence[Any]], start: int, stop: int, skip: int) -> None:
        """Copy tokens `[start, stop)` of the row, which are `[skip, ...)` of the arrays. Raises
        `ValueError` if they do not cover every layer, or are of another kind than a layer's."""
        for leaf, layer in self._layers.items():
            if leaf not in arrays:
                raise ValueError(f"layer {leaf} cannot be resumed at token {stop}")
            parts, held = arrays[leaf], self._in_place.get(leaf, 0)
            first = max(start, held)
            if not parts:
                continue
            plain = layer is None or kind(layer) is Kind.STATE
            if plain or len(parts) != (6 if hasattr(layer, "bits") else 2):
                raise ValueError(f"{type(layer).__name__} differs from the stored layer")
            if first >= stop:
                continue
            if leaf not in self._buffers:
                tokens = self._length - held
                tokens += _slack(layer, tokens, self._room)
                shapes = [(*part.shape[:-2], tokens, part.shape[-1]) for part in parts]
                pairs = zip(shapes, parts, strict=True)
                self._buffers[leaf] = [mx.zeros(shape, part.dtype) for shape, part in pairs]
            for buffer, part in zip(self._buffers[leaf], parts, strict=True):
                piece = part[..., skip + first - start : skip + stop - start, :]
                copy_tokens(piece, buffer, first - held)
        mx.eval([self._buffers[leaf] for leaf in arrays if leaf in self._buffers])

    def finish(self, length: int, snapshot: Snapshot | None) -> list[Any]:
        for leaf, layer in self._layers.items():
            buffers, own = self._buffers.get(leaf), length - self._in_place.get(leaf, 0)
            if buffers is None:
                if leaf in self._in_place:
                    grow_by([layer], self._room)
                continue
            if not _slack(layer, own, self._room):
                buffers = [mx.contiguous(buffer[..., :own, :]) for buffer in buffers]
            set_arrays(layer, buffers)
            layer.offset = length
            if vars(layer).keys() == ROTATING:
                vars(layer)["_idx"] = length
        every, fresh = leaves(self._cache), list[Any]()
        if snapshot is not None:
            for leaf, state in snapshot.layers.items():
                attributes = decode(state, snapshot.pack)
                vars(every[leaf]).update(attributes)
                fresh += [a for _, a in tree_flatten(attributes) if isinstance(a, mx.array)]
        mx.eval(fresh, list(self._buffers.values()))
        return self._cache


def copy_tokens(piece: Any, buffer: Any, at: int) -> None:
    buffer[..., at : at + piece.shape[-2], :] = piece


def _slack(layer: Any, length: int, room: int) -> int:
    if kind(layer) is Kind.APPEND and hasattr(layer, "step"):  # growth in steps: avoid one copy
        return whole_steps(length + max(1, room)) - length
    return 0
