"""Cuts a row cache into segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..memory import leaves
from .buffers import RowBuffers
from .layer_kinds import ArrayPack, Kind, kind, kv_arrays, unwrapped
from .tree import Node

EMPTY = ArrayPack((), ())


@dataclass(frozen=True)
class Charge:
    """The size of tokens that are, or were, in the buffers of a row."""

    nbytes: int
    buffers: int


@dataclass(frozen=True)
class Segment:
    """Immutable keys and values of consecutive tokens, for all layers that can be cut."""

    length: int
    pack: ArrayPack
    """Empty if the tokens are in `held`."""
    layers: tuple[tuple[int, int], ...]
    """(leaf index, number of its arrays): 2, 6 if quantised, 0 for a layer without tokens."""
    charge: Charge | None = None
    """`None`: the size of `pack`."""
    held: RowBuffers | None = None
    start: int = 0
    slack: int = 0
    """Bytes of capacity after it in `held`, if no row uses them."""

    @property
    def nbytes(self) -> int:
        own = self.pack.nbytes if self.charge is None else self.length * self.charge.nbytes
        return own + self.slack

    @property
    def token_bytes(self) -> int:
        return (self.nbytes - self.slack) // self.length

    @property
    def buffers(self) -> int:
        return self.pack.buffers if self.charge is None else self.charge.buffers

    @property
    def needed(self) -> bool:
        return self.held is not None and self.held.needed

    def slice(self, start: int, stop: int) -> Segment:
        """Tokens of a pack are copied."""
        if self.held is not None:
            slack = self.slack if stop == self.length else 0
            return replace(self, length=stop - start, start=self.start + start, slack=slack)
        return Segment(stop - start, self.pack.cut(start, stop), self.layers, self.charge)

    def moved_to(self, held: RowBuffers) -> Segment:
        return replace(self, held=held, slack=0)

    def copied(self) -> Segment:
        arrays = [a for each in self.arrays().values() for a in each]
        return Segment(self.length, ArrayPack.of(arrays), self.layers)

    def loose(self, arrays: Sequence[Any]) -> Segment:
        """The same tokens in these arrays, as many as its buffers have."""
        return Segment(self.length, ArrayPack.loose(arrays), self.layers, self.charge)

    def arrays(self) -> dict[int, list[Any]]:
        """Arrays (1, heads, length, dim) by leaf index: first those of keys, then of values."""
        if self.held is not None:
            span = self.start, self.start + self.length
            own = self.held.layers
            return {
                leaf: self.held.arrays(leaf, *span) if leaf in own else []
                for leaf, _ in self.layers
            }
        found, at = {}, 0
        for leaf, count in self.layers:
            found[leaf] = [self.pack[i] for i in range(at, at + count)]
            at += count
        return found


def segment_of(node: Node) -> Segment:
    return cast("Segment", node.segment)


@dataclass(frozen=True)
class RowParts:
    length: int
    append: Mapping[int, list[Any]]
    """Arrays of the layers that keep every token, in token order, by leaf index."""
    window: Mapping[int, list[Any]]
    """The same for windows that have not wrapped."""
    complete: bool
    exact: bool
    """Whether no layer holds more than `length` tokens, so that its state is a valid snapshot."""

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        """`complete`: with the windows, which must not have wrapped."""
        layers = self._layers(complete=complete)
        arrays = [a[..., start:stop, :] for each in layers.values() for a in each]
        counts = tuple((leaf, len(each)) for leaf, each in layers.items())
        return Segment(stop - start, ArrayPack.of(arrays), counts)

    def within(self, held: RowBuffers, start: int, stop: int) -> Segment:
        """Tokens `start .. stop`, which stay in the row's buffers."""
        charge = Charge(self.token_bytes(complete=False), sum(map(len, self.append.values())))
        return Segment(stop - start, EMPTY, self.shape, charge, held, start)

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        return tuple((leaf, len(each)) for leaf, each in self.append.items())

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
