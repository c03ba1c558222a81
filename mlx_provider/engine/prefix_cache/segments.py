"""How a row cache is cut into segments and rebuilt from them.

A layer is known by its instance attributes (mlx-lm 0.32.2 models/cache.py, mlx-vlm 0.7.10
models/cache.py), because a subclass that adds an attribute has state of its own:

| attributes                                     | upstream                     | kind   |
|------------------------------------------------|------------------------------|--------|
| keys values offset                             | KVCache, ConcatenateKVCache  | APPEND |
| keys values offset group_size bits             | QuantizedKVCache             | APPEND |
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..memory import leaves
from ..room import whole_steps
from .arrays import ArrayPack
from .snapshots import Charge, Snapshot, Unstorable

KV = frozenset({"keys", "values", "offset"})
QUANTISED = KV | {"group_size", "bits"}
ROTATING = KV | {"keep", "max_size", "_idx"}
CHUNKED = KV | {"chunk_size", "start_position"}


class Kind(enum.Enum):
    """What a layer's cache allows."""

    APPEND = "append"
    WINDOW = "window"
    STATE = "state"


def kind(layer: Any) -> Kind:
    """The kind of one leaf of a row cache. Raises `Unstorable` where its state is out of reach."""
    if not hasattr(layer, "__dict__"):
        raise Unstorable(f"{type(layer).__name__} has no attributes to keep")
    names = vars(layer).keys() - {"step"}  # of growth: none of its state
    if names in (KV, QUANTISED):
        return Kind.APPEND
    return Kind.WINDOW if names in (ROTATING, CHUNKED) else Kind.STATE


@dataclass(frozen=True)
class Segment:
    """Keys and values of consecutive tokens, all layers that could be cut. Immutable."""

    length: int
    pack: ArrayPack
    layers: tuple[tuple[int, int], ...]
    """(leaf index, its number of arrays): 2, 6 where quantised, 0 for a layer without tokens."""
    charge: Charge | None = None
    """What it counts for, bytes per token; `None`: its own size."""

    @property
    def nbytes(self) -> int:
        return self.pack.nbytes if self.charge is None else self.length * self.charge.nbytes

    @property
    def buffers(self) -> int:
        return self.pack.buffers if self.charge is None else self.charge.buffers

    def slice(self, start: int, stop: int) -> Segment:
        """Tokens `start .. stop` of this segment, copied."""
        return Segment(stop - start, self.pack.cut(start, stop), self.layers, self.charge)

    def arrays(self) -> dict[int, list[Any]]:
        """Arrays (1, heads, length, dim) by leaf index: first those of keys, then of values."""
        found, at = {}, 0
        for leaf, count in self.layers:
            found[leaf] = [self.pack[i] for i in range(at, at + count)]
            at += count
        return found


@dataclass(frozen=True)
class RowParts:
    """A live row cache that holds `length` tokens or more, as the prefix cache sees it."""

    length: int
    append: Mapping[int, list[Any]]
    """Arrays of the layers that keep every token, in token order, by leaf index."""
    window: Mapping[int, list[Any]]
    """The same for windows that have not wrapped."""
    complete: bool
    """Every layer can be cut."""
    exact: bool
    """No layer holds more than `length` tokens, so its state may serve as a snapshot there."""
    charges: tuple[Charge, Charge] | None = None
    """What its segments count for, without and with the windows; `None`: their own size."""

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        """Tokens `start .. stop`; `complete`: with the windows, which the row must still have."""
        layers = self._layers(complete=complete)
        arrays = [a[..., start:stop, :] for each in layers.values() for a in each]
        counts = tuple((leaf, len(each)) for leaf, each in layers.items())
        charge = None if self.charges is None else self.charges[complete]
        return Segment(stop - start, ArrayPack.of(arrays), counts, charge)

    def token_bytes(self, *, complete: bool) -> int:
        """Bytes that one token counts for in a segment."""
        if self.charges is not None:
            return self.charges[complete].nbytes
        return self.own_size(complete=complete)[0]

    def own_size(self, *, complete: bool) -> tuple[int, int]:
        """Bytes that one token takes in a segment, and the buffers of a segment."""
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
    """Look at a row cache. Raises `Unstorable`, or `ValueError` if it holds fewer tokens."""
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
        if layer.keys is not None:
            exact = exact and layer.offset == length
            if layer.offset < length:
                raise ValueError(f"the cache holds {layer.offset} tokens, not {length}")
        if which is Kind.APPEND:
            append[leaf] = _arrays(layer)
        elif unwrapped(layer):
            window[leaf] = _arrays(layer)
        else:
            complete = False
    return RowParts(length, append, window, complete, exact)


def unwrapped(layer: Any) -> bool:
    """Whether a window still holds every token from the first on."""
    if layer.keys is None:
        return True
    if vars(layer).keys() == CHUNKED:
        return bool(layer.start_position == 0)
    return bool(layer.offset <= layer.max_size and vars(layer)["_idx"] == layer.offset)


def strictest(cache: list[Any]) -> Kind:
    """The kind of the layer that allows least. Raises `Unstorable`."""
    kinds = {kind(layer) for layer in leaves(cache) if layer is not None}
    return next((k for k in (Kind.STATE, Kind.WINDOW) if k in kinds), Kind.APPEND)


def take_snapshot(cache: list[Any], at: int | None = None) -> Snapshot | None:
    """Windows and states as they are now; `None` where every layer keeps every token.

    A window that has not wrapped is taken too: it may have by the time the row is stored.
    `at`: as they were after that many tokens, at the beginning of the last pass or within it,
    which had several tokens; a window still holds what it needs for that, a state does not.
    Raises `Unstorable`, and `ValueError` where what `at` needs is gone.
    """
    attributes = {}
    for leaf, layer in enumerate(leaves(cache)):
        which = kind(layer) if layer is not None else Kind.APPEND
        if which is Kind.WINDOW:
            attributes[leaf] = _window_attributes(layer, at)
        elif which is Kind.STATE:
            if at is not None:
                raise ValueError(f"the state of layer {leaf} is not that after {at} tokens")
            own = vars(layer)
            # of `ArraysCache`, paddings and lengths belong to the batch, not to the row
            attributes[leaf] = {"cache": own["cache"]} if "cache" in own else own
    return Snapshot.of(attributes) if attributes else None


def rebuild(
    cache: list[Any],
    segments: Sequence[Segment],
    snapshot: Snapshot | None,
    *,
    length: int,
    room: int = 0,
) -> None:
    """Fill a fresh row cache with the segments' first `length` tokens.

    `room`: tokens soon to be appended, for which buffers are made large enough.

    Raises `ValueError` if segments and snapshot do not cover every layer, or the fresh cache
    is of another make than the stored one.
    """
    kept = snapshot.layers if snapshot is not None else {}
    parts = _heads(segments, length)
    fresh: list[Any] = []
    runs: list[tuple[Any, list[list[Any]]]] = []
    for leaf, layer in enumerate(leaves(cache)):
        if snapshot is not None and leaf in kept:
            attributes = snapshot.attributes(leaf)
            vars(layer).update(attributes)
            fresh += [a for _, a in tree_flatten(attributes) if isinstance(a, mx.array)]
        elif all(leaf in part for part in parts):
            runs.append((layer, _runs(layer, [part[leaf] for part in parts])))
        else:
            raise ValueError(f"layer {leaf} cannot be resumed at token {length}")
    mx.eval(fresh, _fill([run for run in runs if run[1]], length, room))


def _heads(segments: Sequence[Segment], length: int) -> list[dict[int, list[Any]]]:
    """Arrays of the segments, the last cut so that they hold `length` tokens together."""
    parts = [segment.arrays() for segment in segments]
    extra = sum(segment.length for segment in segments) - length
    if extra and parts:
        keep = segments[-1].length - extra
        last = parts[-1]
        parts[-1] = {leaf: [a[..., :keep, :] for a in each] for leaf, each in last.items()}
    return parts


def _arrays(layer: Any) -> list[Any]:
    """Keys and values in token order, at least `offset` tokens of each."""
    if layer.keys is None:
        return []
    both = (layer.keys, layer.values)
    return [a for each in both for a in (each if isinstance(each, (tuple, list)) else (each,))]


def _window_attributes(layer: Any, at: int | None) -> dict[str, Any]:
    """Attributes of a window after `at` tokens, cut to what the next one can see, oldest first."""
    own = dict(vars(layer))
    if layer.keys is None:
        return own
    if at is not None and at < layer.offset:
        own |= _shortened(own, layer.offset - at)
    if own.keys() == CHUNKED:
        used = own["offset"] - own["start_position"]
        return own | {name: own[name][..., :used, :] for name in ("keys", "values")}
    ordered = {name: _window(own[name], own) for name in ("keys", "values")}
    return own | ordered | {"_idx": ordered["keys"].shape[2]}


def _shortened(own: Mapping[str, Any], behind: int) -> dict[str, Any]:
    """A window without its newest `behind` tokens, which its last pass has appended in order.

    `RotatingKVCache._update_concat` (mlx-lm 0.32.2) keeps what the first of them can see: all but
    the oldest token of a full window. In the state before the pass a blank stands for that one;
    whatever comes next drops or overwrites it unseen.
    Raises `ValueError` where more is gone.
    """
    offset = own["offset"] - behind
    if own.keys() == CHUNKED:
        return {"offset": offset}
    index = own["_idx"] - behind
    gone = min(offset, own["max_size"]) - index
    if gone > 1:
        raise ValueError(f"a window no longer holds its state after {offset} tokens")
    kept = {name: own[name][..., :index, :] for name in ("keys", "values")}
    if gone == 1:
        kept = {name: _blank_first(array, own["keep"]) for name, array in kept.items()}
    return {"offset": offset, "_idx": kept["keys"].shape[2]} | kept


def _blank_first(array: Any, keep: int) -> Any:
    """With a token of zeros before the oldest one that may go."""
    blank = mx.zeros((*array.shape[:-2], 1, array.shape[-1]), dtype=array.dtype)
    return mx.concatenate([array[..., :keep, :], blank, array[..., keep:, :]], axis=2)


def _window(array: Any, own: Mapping[str, Any]) -> Any:
    """One array of a rotating cache: the `keep` first tokens, then the newest, in order."""
    index, keep, size = own["_idx"], own["keep"], own["max_size"]
    if index < own["offset"] and index < array.shape[2]:  # wrapped: the oldest lies at `index`
        pieces = [array[..., :keep, :], array[..., index:, :], array[..., keep:index, :]]
        array = mx.concatenate(pieces, axis=2)
    else:
        array = array[..., :index, :]
    extra = array.shape[2] - size
    if extra > 0:  # a long prefill chunk leaves more than the window; upstream trims it later
        pieces = [array[..., :keep, :], array[..., keep + extra :, :]]
        array = mx.concatenate(pieces, axis=2)
    return array


def _runs(layer: Any, parts: Sequence[list[Any]]) -> list[list[Any]]:
    """What becomes each array of a layer, piece after piece; none for one without tokens."""
    if layer is None or not parts or not parts[0]:
        return []
    count = 6 if vars(layer).keys() == QUANTISED else 2
    if kind(layer) is Kind.STATE or len(parts[0]) != count:
        raise ValueError(f"{type(layer).__name__} is not what was stored")
    return [[part[i] for part in parts] for i in range(count)]


def _fill(layers: Sequence[tuple[Any, list[list[Any]]]], length: int, room: int) -> list[Any]:
    """Give each layer the arrays that its runs make. Returns all those arrays."""
    made: list[Any] = []
    for layer, runs in layers:
        slack = _slack(layer, length, room)
        joined = [_joined(run, slack) for run in runs]
        _hand_over(layer, joined, length)
        made += joined
    return made


def _slack(layer: Any, length: int, room: int) -> int:
    """Tokens for which a layer's buffers have room behind `length`."""
    if kind(layer) is Kind.APPEND and hasattr(layer, "step"):  # grows in steps: spare one copy
        return whole_steps(length + max(1, room)) - length
    return 0


def _joined(pieces: Sequence[Any], slack: int) -> Any:
    """One array of the pieces, one after another along their token axis, and `slack` zeros."""
    first = pieces[0]
    zeros = mx.zeros((*first.shape[:-2], slack, first.shape[-1]), dtype=first.dtype)
    return mx.contiguous(mx.concatenate([*pieces, zeros] if slack else [*pieces], axis=-2))


def _hand_over(layer: Any, arrays: list[Any], length: int) -> None:
    half = len(arrays) // 2
    keys, values = arrays[:half], arrays[half:]
    own = vars(layer)
    own["keys"] = keys[0] if half == 1 else tuple(keys)
    own["values"] = values[0] if half == 1 else tuple(values)
    own["offset"] = length
    if own.keys() == ROTATING:
        own["_idx"] = length
