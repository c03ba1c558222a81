"""Rebuilds a row cache from stored segments and a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kv_capacity import whole_steps
from ..memory import leaves
from ..row_cache import grow_by
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
