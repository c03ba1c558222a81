"""Rebuilds a row cache from stored segments and a snapshot.

Fills a row cache piece by piece with stored segments.

Restores a prefix from disk into the row cache of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kv_capacity import whole_steps
from ..memory import leaves
from ..row_cache import grow_by
from .disk_index import Step
from .files import BadFile, Contents, Header, HostArray, Staged
from .layer_kinds import ROTATING, Kind, kind
from .segments import Segment
from .snapshots import Snapshot


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
            pieces = _runs(layer, [part[leaf] for part in parts])
            if leaf in in_place:
                pieces = [_after(run, in_place[leaf]) for run in pieces]
            runs.append((layer, pieces))
        else:
            raise ValueError(f"layer {leaf} cannot be resumed at token {length}")
    mx.eval(fresh, _fill([run for run in runs if run[1]], length, room))


def _heads(segments: Sequence[Segment], length: int) -> list[dict[int, list[Any]]]:
    """The last one is cut, so that they hold `length` tokens in total."""
    parts = [segment.arrays() for segment in segments]
    extra = sum(segment.length for segment in segments) - length
    if extra and parts:
        keep = segments[-1].length - extra
        last = parts[-1]
        parts[-1] = {leaf: [a[..., :keep, :] for a in each] for leaf, each in last.items()}
    return parts


def _runs(layer: Any, parts: Sequence[list[Any]]) -> list[list[Any]]:
    if layer is None or not parts or not parts[0]:
        return []
    if not is_of(layer, len(parts[0])):
        raise ValueError(f"{type(layer).__name__} differs from the stored layer")
    return [[part[i] for part in parts] for i in range(len(parts[0]))]


def is_of(layer: Any, count: int) -> bool:
    """Whether this many arrays can be a layer's keys and values."""
    if layer is None or kind(layer) is Kind.STATE:
        return False
    return count == (6 if hasattr(layer, "bits") else 2)


def _after(pieces: Sequence[Any], tokens: int) -> list[Any]:
    found = []
    for piece in pieces:
        size = piece.shape[-2]
        if size > tokens:
            found.append(piece[..., tokens:, :] if tokens else piece)
        tokens = max(0, tokens - size)
    return found


def _fill(layers: Sequence[tuple[Any, list[list[Any]]]], length: int, room: int) -> list[Any]:
    """Return all arrays that the layers got."""
    made: list[Any] = []
    for layer, runs in layers:
        if not runs[0]:  # all of it is in place
            grow_by([layer], room)
            continue
        slack = slack_of(layer, sum(piece.shape[-2] for piece in runs[0]), room)
        joined = [_joined(run, slack) for run in runs]
        hand_over(layer, joined, length)
        made += joined
    return made


def slack_of(layer: Any, length: int, room: int) -> int:
    if kind(layer) is Kind.APPEND and hasattr(layer, "step"):  # growth in steps: avoid one copy
        return whole_steps(length + max(1, room)) - length
    return 0


def _joined(pieces: Sequence[Any], slack: int) -> Any:
    first = pieces[0]
    zeros = mx.zeros((*first.shape[:-2], slack, first.shape[-1]), dtype=first.dtype)
    return mx.contiguous(mx.concatenate([*pieces, zeros] if slack else [*pieces], axis=-2))


def hand_over(layer: Any, arrays: list[Any], length: int) -> None:
    half = len(arrays) // 2
    keys, values = arrays[:half], arrays[half:]
    own = vars(layer)
    own["keys"] = keys[0] if half == 1 else tuple(keys)
    own["values"] = values[0] if half == 1 else tuple(values)
    own["offset"] = length
    if own.keys() == ROTATING:
        own["_idx"] = length


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


SLICE = 2**26
"""Bytes copied into a row between two steps."""

Part = tuple[Mapping[int, Sequence[Any]], int, int, int]
"""Arrays by leaf, their tokens `start .. stop`, and the tokens before these in the arrays."""


@dataclass(frozen=True)
class Plan:
    filler: RowFiller
    held: Sequence[Part]
    segments: Sequence[Step]
    state: Header | None
    length: int


class Origin(Protocol):
    def plan(self) -> Plan | None:
        """The files to read now. `None`: memory has the tokens."""

    def usable(self, length: int) -> int:
        """The largest length within `length` at which the row may resume. 0: memory has as many
        tokens."""

    def damaged(self, name: str, reason: BadFile | OSError) -> None:
        """A file cannot be read."""


class Restore:
    """Engine thread only: the reader's thread calls it there."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._plan: Plan | None = None
        self._at = 0
        self._staged: Staged | None = None
        self._left: list[Sequence[tuple[int, int, int]]] = []
        self._state: Snapshot | None = None
        self._reached = 0
        self.ended = False
        """Any thread may read this."""
        self.cache: list[Any] | None = None
        """The row cache once the restore has ended. `None`: nothing was restored."""
        self.length = 0

    def begin(self) -> Sequence[Header]:
        plan = None if self.ended else self._origin.plan()
        if plan is None:
            self.abandon()
            return []
        self._plan = plan
        for arrays, start, stop, skip in plan.held:
            plan.filler.put(arrays, start, stop, skip)
            self._reached = stop
        return self._headers(plan)

    def stage(self, contents: Contents) -> Sequence[HostArray]:
        if self.ended:
            raise FileNotFoundError("the request has ended")
        self._staged = Staged.of(contents)
        return self._staged.views()

    def take(self) -> bool:
        plan, staged = self._plan, self._staged
        if self.ended or plan is None or staged is None:
            return False
        header = self._headers(plan)[self._at]
        if header is plan.state:
            self._state = Snapshot(dict(header.structure["layers"]), staged.pack())
        else:
            if not self._left:
                self._left = _slices(header, staged, plan.filler.leaves)
            self._put(plan, staged)
            if self._left:
                return True
        self._staged = None
        self._at += 1
        return False

    def _put(self, plan: Plan, staged: Staged) -> None:
        _, first, took = plan.segments[self._at - (plan.state is not None)]
        start, stop = max(first, self._reached), min(first + took, plan.length)
        leaves = self._left.pop(0) if self._left else []
        arrays = {leaf: [staged[i] for i in range(at, at + n)] for leaf, at, n in leaves}
        plan.filler.put(arrays, start, stop, start - first)
        if not self._left:
            self._reached = stop

    def stop(self, name: str, reason: BadFile | OSError) -> None:
        if self.ended:
            return
        self._origin.damaged(name, reason)
        plan = self._plan
        length = 0 if plan is None or plan.state is not None else self._reached
        self._end(self._origin.usable(length))

    def finish(self) -> None:
        if not self.ended and self._plan is not None:
            self._end(self._plan.length)

    def abandon(self) -> None:
        """The request ended or the restore failed. Frees its memory at once."""
        self._end(0)

    def _end(self, length: int) -> None:
        if self.ended:
            return
        if length and self._plan is not None:
            self.cache = self._plan.filler.finish(length, self._state)
            self.length = length
        self._plan = self._staged = self._state = None
        self._left = []
        self.ended = True

    def _headers(self, plan: Plan) -> Sequence[Header]:
        """The state first, because nothing is usable without it."""
        state = [] if plan.state is None else [plan.state]
        return [*state, *(header for header, _, _ in plan.segments)]


def leaves_of(state: Header) -> list[int]:
    return [leaf for leaf, _ in state.structure["layers"]]


def _slices(
    header: Header, staged: Staged, wanted: frozenset[int]
) -> list[Sequence[tuple[int, int, int]]]:
    """The leaves of a segment, each with its first array and its number of arrays, in slices."""
    found, at = [], 0
    for leaf, count in header.structure["layers"]:
        if leaf in wanted and count:
            found.append((leaf, at, count))
        at += count
    each = max(1, sum(array.nbytes for array in staged.arrays) // max(1, len(found)))
    size = max(1, SLICE // each)
    return [found[at : at + size] for at in range(0, len(found), size)]
