"""Cuts a row cache into segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..memory import leaves
from .arrays import ArrayPack
from .buffers import RowBuffers
from .layer_kinds import Kind, kind, kv_arrays, unwrapped
from .snapshots import Charge
from .tree import Node

EMPTY = ArrayPack((), ())
Charges = tuple[Charge, Charge, Charge]
"""Of segments without windows, with them, and in a row's buffers."""


@dataclass(frozen=True)
class Segment:
    """Keys and values of consecutive tokens, for all layers that can be cut. Immutable."""

    length: int
    pack: ArrayPack
    """Empty if the tokens are in `held`."""
    layers: tuple[tuple[int, int], ...]
    """(leaf index, number of its arrays): 2, 6 if quantised, 0 for a layer without tokens."""
    charge: Charge | None = None
    """Charged bytes per token. `None`: its own size."""
    held: RowBuffers | None = None
    """Buffers of a row that hold the tokens. `None`: they are copies in `pack`."""
    start: int = 0
    """Tokens before it in `held`."""
    slack: int = 0
    """Bytes of capacity behind it in `held`, if no row uses them."""
    copy: Charge | None = None
    """`charge` of a copy of the tokens in `held`. `None`: its own size."""
    windows: bool = False
    """Whether it has tokens of windows, in any process."""

    @property
    def nbytes(self) -> int:
        own = self.pack.nbytes if self.charge is None else self.length * self.charge.nbytes
        return own + self.slack

    @property
    def token_bytes(self) -> int:
        """Bytes of one of its tokens."""
        return (self.nbytes - self.slack) // self.length

    @property
    def buffers(self) -> int:
        return self.pack.buffers if self.charge is None else self.charge.buffers

    @property
    def needed(self) -> bool:
        """Whether something else than the tree refers to its arrays."""
        return self.held is not None and self.held.needed

    def slice(self, start: int, stop: int) -> Segment:
        """Tokens `start .. stop` of this segment. Those of a pack are copied."""
        if self.held is not None:
            slack = self.slack if stop == self.length else 0
            return replace(self, length=stop - start, start=self.start + start, slack=slack)
        pack = self.pack.cut(start, stop)
        return Segment(stop - start, pack, self.layers, self.charge, windows=self.windows)

    def moved_to(self, held: RowBuffers) -> Segment:
        """The same tokens in other buffers."""
        return replace(self, held=held, slack=0)

    def copied(self) -> Segment:
        """The same tokens as copies, so that its buffers may change."""
        arrays = [a for each in self.arrays().values() for a in each]
        return Segment(self.length, ArrayPack.of(arrays), self.layers, self.copy)

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
    """The segment of a node that was not removed."""
    return cast("Segment", node.segment)


@dataclass(frozen=True)
class RowParts:
    """The parts of a live row cache that holds `length` tokens or more."""

    length: int
    append: Mapping[int, list[Any]]
    """Arrays of the layers that keep every token, in token order, by leaf index."""
    window: Mapping[int, list[Any]]
    """The same for windows that have not wrapped."""
    complete: bool
    """Whether every layer can be cut."""
    exact: bool
    """Whether no layer holds more than `length` tokens, so that its state is a valid snapshot
    there."""
    charges: Charges | None = None
    """Charges of its segments. `None`: their own size."""
    windows: bool = False
    """Whether complete segments have tokens of windows, in any process."""

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        """Tokens `start .. stop`. `complete`: with the windows, which must not have wrapped."""
        layers = self._layers(complete=complete)
        arrays = [a[..., start:stop, :] for each in layers.values() for a in each]
        counts = tuple((leaf, len(each)) for leaf, each in layers.items())
        charge = None if self.charges is None else self.charges[complete]
        windows = complete and self.windows
        return Segment(stop - start, ArrayPack.of(arrays), counts, charge, windows=windows)

    def within(self, held: RowBuffers, start: int, stop: int) -> Segment:
        """Tokens `start .. stop`, which stay in the row's buffers."""
        layers, copy = self.shape, None
        charge = Charge(self.token_bytes(complete=False), self.arrays)
        if self.charges is not None:
            copy, _, charge = self.charges
        return Segment(stop - start, EMPTY, layers, charge, held, start, copy=copy)

    @property
    def arrays(self) -> int:
        """Arrays of the layers that keep every token."""
        return sum(map(len, self.append.values()))

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """`Segment.layers` of the tokens that every layer keeps."""
        return tuple((leaf, len(each)) for leaf, each in self.append.items())

    def token_bytes(self, *, complete: bool) -> int:
        """Charged bytes of one token in a segment."""
        if self.charges is not None:
            return self.charges[complete].nbytes
        return self.own_size(complete=complete)[0]

    def own_size(self, *, complete: bool) -> tuple[int, int]:
        """Actual bytes of one token in a segment, and buffers of a segment."""
        arrays = [a for each in self._layers(complete=complete).values() for a in each]
        kinds = {(*a.shape[:-2], a.shape[-1], str(a.dtype)) for a in arrays}
        return sum(a.nbytes // max(1, a.shape[-2]) for a in arrays), len(kinds)

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
    """The parts of a row cache. Raises `Unstorable`, or `ValueError` if it holds fewer tokens."""
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
    return RowParts(length, append, window, complete, exact, windows=bool(window))
