"""Segments: keys and values of consecutive tokens, cut out of a row cache and put into another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kv_capacity import whole_steps
from ..memory import leaves
from ..row_cache import grow_by
from .buffers import RowBuffers
from .layers import ROTATING, ArrayPack, Kind, Snapshot, kind, kv_arrays, set_arrays, unwrapped

EMPTY = ArrayPack((), ())


@dataclass(frozen=True)
class Segment:
    """Immutable tokens of all layers that can be cut, in arrays of its own or in a row's buffers.

    It holds tokens `[0, length)` of `pack`, or `[start, start + length)` of `held`.
    """

    length: int
    token_bytes: int
    buffers: int
    """Device buffers that it has, or would have on its own."""
    layers: tuple[tuple[int, int], ...]
    """(leaf index, number of its arrays): 2, 6 if quantised, 0 for a layer without tokens."""
    pack: ArrayPack = EMPTY
    held: RowBuffers | None = None
    start: int = 0
    slack: int = 0
    """Bytes of capacity after it in `held`, if no row uses them."""

    @property
    def nbytes(self) -> int:
        return self.length * self.token_bytes + self.slack

    @property
    def needed(self) -> bool:
        """Whether a row refers to its arrays, so that eviction frees nothing."""
        return self.held is not None and self.held.needed

    def slice(self, start: int, stop: int) -> Segment:
        """Tokens `[start, stop)`, copied unless they are in a row's buffers."""
        if self.held is not None:
            slack = self.slack if stop == self.length else 0
            return replace(self, length=stop - start, start=self.start + start, slack=slack)
        return replace(self, length=stop - start, pack=self.pack.cut(start, stop))

    def copied(self) -> Segment:
        pack = ArrayPack.of([a for each in self.arrays().values() for a in each])
        return replace(self, buffers=pack.buffers, pack=pack, held=None, start=0, slack=0)

    def loose(self, arrays: Sequence[Any]) -> Segment:
        """The same tokens in these arrays, as many as its buffers have."""
        return replace(self, pack=ArrayPack.loose(arrays), held=None, start=0, slack=0)

    def arrays(self) -> dict[int, list[Any]]:
        """Arrays (1, heads, length, dim) by leaf index: first those of keys, then of values."""
        found: dict[int, list[Any]] = {}
        if self.held is not None:
            span = self.start, self.start + self.length
            for leaf, _ in self.layers:
                found[leaf] = self.held.arrays(leaf, *span) if leaf in self.held.layers else []
            return found
        at = 0
        for leaf, count in self.layers:
            found[leaf] = [self.pack[i] for i in range(at, at + count)]
            at += count
        return found


@dataclass(frozen=True)
class RowParts:
    """The tokens `[0, length)` of a row cache, as far as its layers can be cut."""

    length: int
    append: Mapping[int, list[Any]]
    """Arrays of the layers that keep every token, in token order, by leaf index."""
    window: Mapping[int, list[Any]]
    """The same for windows that have not wrapped."""
    complete: bool
    exact: bool
    """Whether no layer holds more than `length` tokens, so that its state is a valid snapshot."""

    def arrays(self, start: int, stop: int, *, complete: bool) -> list[Any]:
        """Views of tokens `[start, stop)`. `complete`: with the windows."""
        every = self._layers(complete=complete).values()
        return [a[..., start:stop, :] for each in every for a in each]

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        pack = ArrayPack.of(self.arrays(start, stop, complete=complete))
        size, shape = self.token_bytes(complete=complete), self.shape(complete=complete)
        return Segment(stop - start, size, pack.buffers, shape, pack)

    def within(self, held: RowBuffers, start: int, stop: int) -> Segment:
        """Tokens `[start, stop)`, which stay in the row's buffers."""
        size, shape = self.token_bytes(complete=False), self.shape(complete=False)
        buffers = sum(count for _, count in shape)
        return Segment(stop - start, size, buffers, shape, held=held, start=start)

    def shape(self, *, complete: bool) -> tuple[tuple[int, int], ...]:
        return tuple((leaf, len(each)) for leaf, each in self._layers(complete=complete).items())

    def token_bytes(self, *, complete: bool) -> int:
        arrays = [a for each in self._layers(complete=complete).values() for a in each]
        return sum(a.nbytes // max(1, a.shape[-2]) for a in arrays)

    def _layers(self, *, complete: bool) -> Mapping[int, list[Any]]:
        return {**self.append, **(self.window if complete else {})}

    @property
    def layout(self) -> tuple[Any, ...]:
        """Equal for rows whose segments can be joined."""
        return tuple(
            (leaf, *((a.shape[:-2], a.shape[-1], str(a.dtype)) for a in each))
            for leaf, each in self.append.items()
        )


def row_parts(cache: list[Any], length: int) -> RowParts:
    """Raises `Unstorable`, or `ValueError` if the cache holds fewer tokens."""
    append: dict[int, list[Any]] = {}
    window: dict[int, list[Any]] = {}
    complete = exact = True
    for leaf, layer in enumerate(leaves(cache)):
        if layer is None:
            append[leaf] = []
            continue
        which = kind(layer)
        if which is Kind.STATE:
            complete = False
            continue
        if layer.keys is not None or layer.offset:
            exact = exact and layer.offset == length
            if layer.offset < length:
                raise ValueError(f"the cache holds {layer.offset} tokens, not {length}")
        if which is Kind.APPEND:
            append[leaf] = kv_arrays(layer)
        elif unwrapped(layer):
            window[leaf] = kv_arrays(layer)
        else:
            complete = False
    return RowParts(length, append, window, complete, exact)


def rebuild(
    cache: list[Any],
    segments: Sequence[Segment],
    snapshot: Snapshot | None,
    *,
    length: int,
    room: int = 0,
    in_place: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Fill a fresh row cache with the segments' first `length` tokens, with capacity for `room`
    more.

    `in_place`: tokens that some layers hold already, by leaf index. Raises `ValueError` if segments
    and snapshot do not cover every layer, or the cache is of another kind than the stored one.
    """
    states = snapshot.layers if snapshot is not None else {}
    parts, extra = [each.arrays() for each in segments], sum(s.length for s in segments) - length
    if extra and parts:
        keep = segments[-1].length - extra
        parts[-1] = {leaf: [a[..., :keep, :] for a in each] for leaf, each in parts[-1].items()}
    made: list[Any] = []
    for leaf, layer in enumerate(leaves(cache)):
        if leaf in states:
            continue
        if not all(leaf in part for part in parts):
            raise ValueError(f"layer {leaf} cannot be resumed at token {length}")
        pieces = [part[leaf] for part in parts if part[leaf]]
        if not pieces:
            continue
        _check_fits(layer, len(pieces[0]))
        runs = [_after(each, in_place.get(leaf, 0)) for each in zip(*pieces, strict=True)]
        if not runs[0]:  # all of it is in place
            grow_by([layer], room)
            continue
        slack = _slack(layer, sum(piece.shape[-2] for piece in runs[0]), room)
        joined = [_join(run, slack) for run in runs]
        _hand_over(layer, joined, length)
        made += joined
    mx.eval(made, restore_states(cache, snapshot))


def restore_states(cache: list[Any], snapshot: Snapshot | None) -> list[mx.array]:
    """Give layers their states. Returns the new arrays, which must be evaluated."""
    if snapshot is None:
        return []
    fresh: list[mx.array] = []
    every = leaves(cache)
    for leaf in snapshot.layers:
        attributes = snapshot.attributes(leaf)
        vars(every[leaf]).update(attributes)
        fresh += [a for _, a in tree_flatten(attributes) if isinstance(a, mx.array)]
    return fresh


def _check_fits(layer: Any, count: int) -> None:
    """Raises `ValueError` unless so many arrays can be a layer's keys and values."""
    plain = layer is None or kind(layer) is Kind.STATE
    if plain or count != (6 if hasattr(layer, "bits") else 2):
        raise ValueError(f"{type(layer).__name__} differs from the stored layer")


def _after(pieces: Sequence[Any], tokens: int) -> list[Any]:
    found = []
    for piece in pieces:
        size = piece.shape[-2]
        if size > tokens:
            found.append(piece[..., tokens:, :] if tokens else piece)
        tokens = max(0, tokens - size)
    return found


def _slack(layer: Any, length: int, room: int) -> int:
    if kind(layer) is Kind.APPEND and hasattr(layer, "step"):  # growth in steps: avoid one copy
        return whole_steps(length + max(1, room)) - length
    return 0


def _join(pieces: Sequence[Any], slack: int) -> Any:
    first = pieces[0]
    zeros = mx.zeros((*first.shape[:-2], slack, first.shape[-1]), dtype=first.dtype)
    return mx.contiguous(mx.concatenate([*pieces, zeros] if slack else [*pieces], axis=-2))


def _hand_over(layer: Any, arrays: list[Any], length: int) -> None:
    set_arrays(layer, arrays)
    layer.offset = length
    if vars(layer).keys() == ROTATING:
        vars(layer)["_idx"] = length


class RowFiller:
    """Fills a fresh row cache piece by piece, which needs no other memory than that of a piece."""

    def __init__(self, cache: list[Any], length: int, room: int, states: frozenset[int]) -> None:
        """`length`: most tokens. `room`: capacity for more. `states`: leaves that get the state of
        a snapshot."""
        self._cache = cache
        self._length = length
        self._room = room
        self._buffers: dict[int, list[Any]] = {}
        self._layers = {i: leaf for i, leaf in enumerate(leaves(cache)) if i not in states}

    def put(self, arrays: Mapping[int, Sequence[Any]], start: int, stop: int, skip: int) -> None:
        """Copy tokens `[start, stop)` of the row, which are `[skip, ...)` of the arrays. Raises
        `ValueError` for arrays of another kind than the layer's."""
        for leaf, parts in arrays.items():
            layer = self._layers.get(leaf)
            if layer is None or not parts:
                continue
            _check_fits(layer, len(parts))
            if leaf not in self._buffers:
                tokens = self._length + _slack(layer, self._length, self._room)
                shapes = [(*part.shape[:-2], tokens, part.shape[-1]) for part in parts]
                pairs = zip(shapes, parts, strict=True)
                self._buffers[leaf] = [mx.zeros(shape, part.dtype) for shape, part in pairs]
            for buffer, part in zip(self._buffers[leaf], parts, strict=True):
                buffer[..., start:stop, :] = part[..., skip : skip + stop - start, :]
        mx.eval([self._buffers[leaf] for leaf in arrays if leaf in self._buffers])

    def finish(self, length: int, snapshot: Snapshot | None) -> list[Any]:
        for leaf, layer in self._layers.items():
            buffers = self._buffers.get(leaf)
            if buffers is None:
                continue
            if not _slack(layer, self._length, self._room):
                buffers = [mx.contiguous(buffer[..., :length, :]) for buffer in buffers]
            _hand_over(layer, buffers, length)
        mx.eval(restore_states(self._cache, snapshot), list(self._buffers.values()))
        return self._cache
