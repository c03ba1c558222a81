"""Fills a row cache piece by piece with stored segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..memory import leaves
from .rebuild import hand_over, is_of, slack_of
from .snapshots import Snapshot


class RowFiller:
    """Each piece is copied into place, so a row needs no other memory than that of the piece."""

    def __init__(self, cache: list[Any], length: int, room: int, states: frozenset[int]) -> None:
        """`cache`: a fresh cache. `states`: leaves that get the state of a snapshot."""
        self._cache = cache
        self._length = length
        self._room = room
        self._buffers: dict[int, list[Any]] = {}
        self._layers = {i: leaf for i, leaf in enumerate(leaves(cache)) if i not in states}

    @property
    def leaves(self) -> frozenset[int]:
        return frozenset(self._layers)

    def put(self, arrays: Mapping[int, Sequence[Any]], start: int, stop: int, skip: int) -> None:
        """`skip`: tokens in front of `start` in the arrays. Raises `ValueError` for arrays of
        another kind than the layer's."""
        for leaf, parts in arrays.items():
            layer = self._layers.get(leaf)
            if layer is None or not parts:
                continue
            if not is_of(layer, len(parts)):
                raise ValueError(f"{type(layer).__name__} differs from the stored layer")
            if leaf not in self._buffers:
                tokens = self._length + slack_of(layer, self._length, self._room)
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
            if not slack_of(layer, self._length, self._room):
                buffers = [mx.contiguous(buffer[..., :length, :]) for buffer in buffers]
            hand_over(layer, buffers, length)
        fresh = []
        if snapshot is not None:
            every = leaves(self._cache)
            for leaf in snapshot.layers:
                attributes = snapshot.attributes(leaf)
                vars(every[leaf]).update(attributes)
                fresh += [a for _, a in tree_flatten(attributes) if isinstance(a, mx.array)]
        mx.eval(fresh, list(self._buffers.values()))
        return self._cache
