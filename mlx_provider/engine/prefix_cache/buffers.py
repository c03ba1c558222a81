"""KV buffers of rows that stored segments refer to, so that a row becomes an entry without a copy.

MLX updates a row's layers in place only while nothing else refers to their arrays. So a segment
refers to the layers, and cuts views out of them only while they are read. When a second row
branches off within a row's tokens, these are copied once, into a `Prefix`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...upstream.shared_kv import SHAREABLE, Prefix, divide, prefix_of
from ..kv_capacity import whole_steps
from ..memory import leaves
from .layer_kinds import Kind, kind, kv_arrays


class RowBuffers:
    """Keys and values of a row's tokens, or of a prefix of several rows, by leaf index."""

    def __init__(
        self,
        layers: dict[int, Any],
        first: int = 0,
        base: RowBuffers | None = None,
    ) -> None:
        """`base`: the common prefix, which holds the tokens before `first`."""
        self.layers = layers
        self.first = first
        self.base = base
        self.stored = 0
        self.intact = True
        """False after a device failure in its last row."""
        self._users: tuple[weakref.ref[Holding], ...] = ()
        self._above: tuple[weakref.ref[RowBuffers], ...] = ()
        self._heads: dict[int, weakref.WeakValueDictionary[int, Prefix]] = {}
        if base is not None:
            base.supports(self)

    @property
    def common(self) -> bool:
        return any(isinstance(layer, Prefix) for layer in self.layers.values())

    @property
    def token_bytes(self) -> int:
        arrays = [a for layer in self.layers.values() for a in _own_arrays(layer)]
        return sum(a.nbytes // max(1, a.shape[-2]) for a in arrays)

    @property
    def capacity(self) -> int:
        """Tokens that fit, including those of its prefix."""
        every = self.layers.values()
        return max(_before(x) + int(a.shape[-2]) for x in every for a in _own_arrays(x))

    @property
    def in_use(self) -> bool:
        """Any thread may ask."""
        users = (ref() for ref in self._users)
        return any(user is not None and self in user.buffers for user in users)

    @property
    def holding(self) -> Holding | None:
        users = (ref() for ref in self._users)
        return next((user for user in users if user is not None and user.own is self), None)

    @property
    def needed(self) -> bool:
        above = (ref() for ref in self._above)
        return self.in_use or any(each is not None and each.stored for each in above)

    @property
    def lost(self) -> bool:
        """Whether its row has failed, so that its arrays may be corrupted."""
        return not self.intact and not self.in_use

    def arrays(self, leaf: int, start: int, stop: int) -> list[Any]:
        """Views of tokens `start .. stop`. Drop them before the row's next pass."""
        layer = self.layers[leaf]
        found = _own_arrays(layer) if isinstance(layer, Prefix) else kv_arrays(layer)
        return [each[..., start:stop, :] for each in found]

    def head(self, length: int) -> Mapping[int, Prefix]:
        """The same objects as long as a row has them: they tell which rows attend together."""
        held = self._heads.setdefault(length, weakref.WeakValueDictionary())
        found = {leaf: held.get(leaf) or each.head(length) for leaf, each in self.layers.items()}
        held.update(found)
        return found

    def supports(self, above: RowBuffers) -> None:
        """Other buffers begin with this prefix."""
        self._above = (*(ref for ref in self._above if ref() is not None), weakref.ref(above))

    def used_by(self, row: Holding) -> None:
        self._users = (*(ref for ref in self._users if ref() is not None), weakref.ref(row))

    def is_of(self, cache: Sequence[Any]) -> bool:
        every = leaves(cache)
        return all(every[leaf] is layer for leaf, layer in self.layers.items())

    def count(self, length: int, token_bytes: int) -> None:
        """The prefix cache counts the first `length` tokens: they are not charged to the row."""
        self.stored = max(self.stored, (length - self.first) * token_bytes)

    def slack(self, length: int) -> int:
        found = 0
        for layer in self.layers.values():
            for each in _own_arrays(layer):
                unused = each.shape[-2] - (length - _before(layer))
                found += each.nbytes // max(1, each.shape[-2]) * max(0, unused)
        return found

    def trim(self, length: int) -> None:
        for layer in self.layers.values():
            own = length - _before(layer)
            cut = [mx.contiguous(a[..., :own, :]) for a in _own_arrays(layer)]
            mx.eval(cut)
            _set_arrays(layer, cut)

    def pieces(self, leaf: int, spans: Sequence[tuple[int, int]]) -> list[list[Any]]:
        """Copies of parts of a leaf, whose own arrays end with that."""
        found = [[mx.contiguous(a) for a in self.arrays(leaf, *span)] for span in spans]
        mx.eval(found)
        layer = self.layers.pop(leaf)
        if not isinstance(layer, Prefix):
            layer.keys = layer.values = None
        return found

    def move_to(self, cache: Sequence[Any], length: int) -> None:
        every = leaves(cache)
        for leaf, layer in self.layers.items():
            fresh = every[leaf]
            fresh.__class__ = layer.__class__
            vars(fresh).update(vars(layer))
            vars(layer).clear()
            fresh.offset = length
            self.layers[leaf] = fresh

    def grow(self, length: int, room: int, spare: int) -> None:
        """Make capacity for `room` tokens after the first `length`, and for as many again (a
        conversation that continues may continue again), but at most `spare`. Copies layer by
        layer."""
        own = length - self.first
        if any(_before(layer) != self.first for layer in self.layers.values()):
            return  # some layers were united with the prefix: each grows by itself
        if all(a.shape[-2] >= own + room for x in self.layers.values() for a in _own_arrays(x)):
            return
        capacity = whole_steps(own + room + min(own, spare))
        for layer in self.layers.values():
            grown = [extended(a[..., :own, :], capacity - own) for a in _own_arrays(layer)]
            mx.eval(grown)
            _set_arrays(layer, grown)

    def divided(self, at: int) -> RowBuffers:
        """Make the first `at` tokens a prefix for other rows. Copies each layer once."""
        mx.eval(
            [_own_arrays(layer) for layer in self.layers.values()]
        )  # or raise before any change
        room = self.capacity - at
        layers = {x: divide(layer, at, room) for x, layer in self.layers.items()}
        prefix = RowBuffers(layers)
        self.first, self.base = at, prefix
        prefix.supports(self)
        user = self.holding
        if user is not None:
            user.share(prefix, at)
            user.capacity = self.capacity
        return prefix


class Holding:
    def __init__(
        self, own: RowBuffers | None, base: RowBuffers | None = None, shared: int = 0
    ) -> None:
        """`own`: `None` if no entry can refer to it. `shared`: tokens of the row in `base`."""
        self.own = own
        self.base = base
        self.capacity = 0
        """0: unknown, because the row did not begin with buffers of an entry or a prefix."""
        self._shared = shared
        self._token_bytes = 0 if base is None else base.token_bytes
        for each in self.buffers:
            each.used_by(self)
        if own is not None:
            own.intact = False

    def share(self, base: RowBuffers, tokens: int) -> None:
        self.base, self._shared, self._token_bytes = base, tokens, base.token_bytes
        base.used_by(self)

    def own_of(self, cache: Sequence[Any]) -> RowBuffers | None:
        """`None`: `cache` has other buffers, because the row was merged."""
        return self.own if self.own is not None and self.own.is_of(cache) else None

    @property
    def buffers(self) -> tuple[RowBuffers, ...]:
        return tuple(each for each in (self.base, self.own) if each is not None)

    @property
    def stored(self) -> int:
        """Bytes of the row's KV that the prefix cache counts."""
        own = 0 if self.own is None else self.own.stored
        shared = self._shared * self._token_bytes
        return own + (0 if self.base is None else min(self.base.stored, shared))

    def beyond(self, tokens: int) -> int:
        """Bytes of a row of this capacity, less those of a row without a prefix. May be negative:
        own buffers have whole steps too."""
        whole = self._shared + whole_steps(tokens - self._shared)
        return (whole - whole_steps(tokens)) * self._token_bytes

    def give_back(self) -> RowBuffers | None:
        """The row uses its own buffers no longer, and none of its passes has failed."""
        own, self.own, self.capacity = self.own, None, 0
        if own is not None:
            own.intact = True
        return own

    def trim(self, tokens: int) -> None:
        if self.own is not None:
            self.own.trim(max(tokens, *(each.offset for each in self.own.layers.values())))
            self.capacity = self.own.capacity


class Claim(Holding):
    """The buffers that a prompt will use if it is admitted. They stay while memory is made."""

    def __init__(
        self, claimed: Sequence[RowBuffers], nbytes: int, shared: int = 0, token_bytes: int = 0
    ) -> None:
        """`nbytes`: of the tokens that it will use in them. `shared`: tokens of a prefix."""
        self._claimed = tuple(claimed)
        self._nbytes = nbytes
        super().__init__(None)
        self._shared, self._token_bytes = shared, token_bytes

    @property
    def buffers(self) -> tuple[RowBuffers, ...]:
        return self._claimed

    @property
    def stored(self) -> int:
        return self._nbytes


def own_layers(cache: Sequence[Any]) -> dict[int, Any]:
    """The layers of a row cache that keep every token, by leaf index."""
    every = enumerate(leaves(cache))
    return {leaf: each for leaf, each in every if each is not None and kind(each) is Kind.APPEND}


def divisible(layers: Mapping[int, Any]) -> bool:
    return bool(layers) and all(type(layer) in SHAREABLE for layer in layers.values())


def shares(cache: Sequence[Any]) -> bool:
    return any(prefix_of(layer) is not None for layer in leaves(cache))


def _before(layer: Any) -> int:
    prefix = prefix_of(layer)
    return 0 if prefix is None else prefix.length


def _own_arrays(layer: Any) -> list[Any]:
    """Keys and values after the common prefix."""
    if layer.keys is None:
        return []
    both = (layer.keys, layer.values)
    return [a for each in both for a in (each if isinstance(each, (tuple, list)) else (each,))]


def extended(array: Any, tokens: int) -> Any:
    shape = (*array.shape[:-2], tokens, array.shape[-1])
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=-2)


def _set_arrays(layer: Any, arrays: list[Any]) -> None:
    half = len(arrays) // 2
    if half:
        keys, values = tuple(arrays[:half]), tuple(arrays[half:])
        layer.keys, layer.values = (keys[0], values[0]) if half == 1 else (keys, values)
