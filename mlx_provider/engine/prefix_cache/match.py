"""The stored part of a prompt, and the position at which a row can resume.

Lets a row use the buffers of an entry: it takes them over, or shares their first tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ...isolation import Isolation
from ...upstream.shared_kv import prefix_of, start
from ..kv_capacity import STEP_TOKENS, whole_steps
from ..memory import leaves
from .buffers import Claim, Holding, RowBuffers, divisible, own_layers
from .segments import Segment, segment_of
from .snapshots import Snapshot
from .store import Store
from .tree import Ids, Node, Walk, outside_spans, set_segment, split


@dataclass(frozen=True)
class Match:
    length: int
    asked: int
    shared: int
    """Tokens in common with the closest stored path. More than `length` if a state is missing."""
    branch: int
    """Tokens before the point where this prompt leaves another one. 0: it leaves none."""
    diverged_at: int | None
    """First position that differs from that path, if any."""
    stored_token: int | None
    path: tuple[Node, ...] = ()
    stateful: Node | None = None
    version: int = 0
    counted: bool = True
    """Whether a client has asked for the prompt, so that it counts as a look-up."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(cast("Segment", node.segment) for node in self.path)

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.stateful is None else cast("Snapshot", self.stateful.snapshot)


def resume(found: Walk, ids: Ids, version: int) -> Match:
    usable = outside_spans(ids, found.shared)
    length, stateful = 0, None
    for node, agreed in found.steps:
        if node.complete:
            length, stateful = min(usable, node.start + agreed), None
        elif (
            node.snapshot is not None
            and agreed == len(node.tokens)
            and node.stop == outside_spans(ids, node.stop) <= usable
        ):
            length, stateful = node.stop, node
    return Match(
        length,
        len(ids),
        found.shared,
        found.branch,
        found.diverged_at,
        found.stored_token,
        tuple(node for node, _ in found.steps if node.start < length),
        stateful,
        version,
    )


log = logging.getLogger(__name__)


class Reuse:
    """Engine thread only."""

    def __init__(self, store: Store, least: int | None) -> None:
        """`least`: fewest tokens to share; `None`: this model's rows share none."""
        self._store = store
        self._least = least

    def prepare(self, match: Match) -> bool:
        """Split the entry where the row will leave it. Returns whether to match again."""
        own = _last(match)
        if own is not None and self._may_take(own, match):
            return self._cut_behind(own, match)
        first = segment_of(match.path[0]).held if match.path else None
        if self._least is None or first is None or first.common or first.first:
            return False
        at = self._divisible(first, match)
        return bool(at) and self._divide(first, at, match.path)

    def begin(
        self, match: Match, cache: list[Any], room: int, spare: int
    ) -> tuple[Holding, dict[int, int]]:
        """Give a fresh row cache what it need not copy. Returns the row's holding, and the tokens
        in place, by leaf index. `room`, `spare` (bytes): see `RowBuffers.grow`."""
        own = _last(match)
        if own is not None and self._may_take(own, match) and not self._beyond(own, match):
            own.move_to(cache, match.length)
            self._store.use_slack(own)
            holding = Holding(own, own.base, own.first)
            own.grow(match.length, room, spare // max(1, segment_of(match.path[0]).token_bytes))
            holding.capacity = own.capacity
            return holding, dict.fromkeys(own.layers, match.length)
        layers, base = own_layers(cache), self._common(match)
        if base is None:
            own = RowBuffers(layers) if layers else None
            self._store.know(own)
            return Holding(own), {}
        length = _end(base, match)
        for leaf, prefix in base.head(length).items():
            start(layers[leaf], prefix)
        own = None
        if layers.keys() == base.layers.keys():
            own = RowBuffers(layers, length, base)
        self._store.know(own)
        holding = Holding(own, base, length)
        holding.capacity = length + whole_steps(match.length + room - length)
        return holding, dict.fromkeys(base.layers, length)

    def fork(self, holding: Holding, cache: list[Any]) -> tuple[list[Any], Holding | None]:
        """Another row with the tokens of a row whose prompt is complete. Both share all tokens but
        the last, if these are enough."""
        own = holding.own
        if own is not None and self._least is not None and own.is_of(cache) and own.base is None:
            held = min(int(layer.offset) for layer in own.layers.values())
            if held > self._least and divisible(own.layers):
                self._divide(own, held - 1, self._store.nodes_in(own))
        copied = deepcopy(cache)
        for layer in leaves(copied):
            if (prefix := prefix_of(layer)) is not None:
                prefix.holders.add(layer)
        if own is None or own.base is None or not own.is_of(cache):
            return copied, None
        other = RowBuffers(own_layers(copied), own.first, own.base)
        self._store.know(other)
        holding = Holding(other, own.base, own.first)
        holding.capacity = other.capacity
        return copied, holding

    def claim(self, match: Match) -> Claim | None:
        own = _last(match)
        if own is not None and self._may_take(own, match):
            tokens, shared, steps = match.length, own.first, 0
            claimed = [each for each in (own.base, own) if each is not None]
        else:
            first = segment_of(match.path[0]).held if match.path else None
            if self._least is None or first is None or first.first:
                return None
            tokens = _end(first, match) if first.common else self._divisible(first, match)
            shared, claimed = tokens, [first]
            steps = 0 if first.common else STEP_TOKENS  # a row that is divided may take one more
        if tokens < max(1, self._least or 0) and claimed[-1] is not own:
            return None
        each = segment_of(match.path[0]).token_bytes
        return Claim(claimed, (tokens - steps) * each, shared, each)

    def _may_take(self, own: RowBuffers, match: Match) -> bool:
        if own.common or own.needed or not own.intact:
            return False
        fits = all(
            segment_of(node).held is (own if node.start >= own.first else own.base)
            for node in match.path
        )
        # what the row would overwrite is copied
        return fits and self._beyond(own, match) <= match.length - own.first

    def _beyond(self, own: RowBuffers, match: Match) -> int:
        return max(node.stop for node in self._store.nodes_in(own)) - match.length

    def _cut_behind(self, own: RowBuffers, match: Match) -> bool:
        if not self._beyond(own, match):
            return False
        last = match.path[-1]
        if match.length < last.stop:
            split(last, match.length - last.start)
        for node in self._store.nodes_in(own):
            if node.start >= match.length:
                set_segment(node, segment_of(node).copied())
        self._store.recount()
        return True

    def _common(self, match: Match) -> RowBuffers | None:
        base = segment_of(match.path[0]).held if match.path and self._least is not None else None
        if base is None or not base.common or _end(base, match) < (self._least or 0):
            return None
        return base

    def _divisible(self, row: RowBuffers, match: Match) -> int:
        """The first tokens of a row that others can share. 0: none, or too few for the copy."""
        if not divisible(row.layers):
            return 0
        held = min(int(layer.offset) for layer in row.layers.values())
        at = min(_end(row, match), held - 1)  # one token at least stays the row's own
        return 0 if at < max(1, self._least or 0) or held > 2 * at else at

    def _divide(self, row: RowBuffers, at: int, path: Sequence[Node]) -> bool:
        """Copy the buffers once. `path`: the nodes in them."""
        layers = row.layers.values()
        with Isolation() as tried:  # a failed pass of that row must not fail this one
            mx.eval([layer.keys for layer in layers])
            prefix = row.divided(at)
            self._store.know(prefix)
            for node in [n for n in path if n.start < at]:
                upper = split(node, at - node.start) if node.stop > at else node
                set_segment(upper, segment_of(upper).moved_to(prefix))
            self._store.recount()
        if tried.fault is not None:
            log.warning("a prefix in use is not shared: %s", tried.fault.summary)
        return tried.fault is None


def _last(match: Match) -> RowBuffers | None:
    return segment_of(match.path[-1]).held if match.path else None


def _end(buffers: RowBuffers, match: Match) -> int:
    stop = 0
    for node in match.path:
        if segment_of(node).held is not buffers:
            break
        stop = min(node.stop, match.length)
    return stop
