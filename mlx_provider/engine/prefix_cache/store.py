"""The stored paths of all keys: how they grow from rows, what they take, and what leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any

from ..row_cache import Unstorable
from .buffers import RowBuffers
from .eviction import evict, fit
from .segments import ArrayPack, RowParts, Snapshot, take_snapshot
from .tree import (
    ID_BYTES,
    CacheKey,
    Ids,
    Match,
    Node,
    Tally,
    add,
    check,
    match,
    new_root,
    nodes,
    remove_below,
    segment_of,
    set_segment,
    set_snapshot,
    split,
)

RECENT = 3
"""Message ends kept per path besides the end of the system prompt."""
INSIDE = 2
"""Further snapshots kept per path: guesses, and branch points of prompts."""
MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""
NEAR = 16
"""This many tokens are cheaper to compute again than to store with a state."""
NOTHING: frozenset[Node] = frozenset()
Share = tuple[int, Callable[[], list[Node]]]


@dataclass(frozen=True)
class LivePath:
    """A row that is to be stored. `given`, `spare`: snapshots by token count; the latter may only
    end a path that is stored in part."""

    row: RowParts
    cache: list[Any]
    given: Mapping[int, Snapshot]
    prompted: int
    """Tokens before the reply."""
    spare: Mapping[int, Snapshot] = field(default_factory=dict)
    buffers: RowBuffers | None = None
    """Those of the row, to which its entry may refer."""

    @cached_property
    def states(self) -> Mapping[int, Snapshot]:
        last = take_snapshot(self.cache) if self.row.exact else None
        return {**self.given, **({} if last is None else {self.row.length: last})}

    def refers(self, path: Sequence[Node], length: int) -> bool:
        """Whether the whole path can refer to the row's buffers, so that no token is held twice.
        Its stored nodes must be copies of the row's own tokens alone, or refer to the buffers."""
        own = self.buffers
        if own is None or (self.row.complete and self.row.windows):
            return False
        for node in path:
            segment = segment_of(node)
            of_another = segment.held is not None and segment.held is not own
            if node.stop > length:
                return False
            if node.start < own.first:
                if segment.held is not own.base:
                    return False
            elif of_another or segment.layers != self.row.shape:
                return False
        return True


class Store:
    """One tree per key. No method keeps more than `budget` bytes or `max_buffers` buffers."""

    def __init__(self, max_buffers: int) -> None:
        self.tally = Tally()
        self.version = 0
        self.evicted_bytes = 0
        self.roots: dict[CacheKey, Node] = {}
        self._layouts: dict[CacheKey, tuple[Any, ...]] = {}
        self._max_buffers = max_buffers
        self._known: tuple[weakref.ref[RowBuffers], ...] = ()
        self._clock = 0
        """Bytes stored so far, plus one per use."""

    def nodes(self) -> Iterator[Node]:
        return (node for root in self.roots.values() for node in nodes(root))

    def match(self, key: CacheKey, ids: Ids, limit: int | None = None) -> Match:
        self._drop_lost()
        limit = len(ids) if limit is None else limit
        return match(self.roots.get(key) or new_root(), ids, limit, self.version)

    def touch(self, leaf: Node | None) -> list[Node]:
        """The path of a leaf, which is in use now."""
        self._clock += 1
        path = [] if leaf is None else leaf.path()
        for node in path:
            node.used = self._clock
        return path

    # -- growth

    def add(
        self, key: CacheKey, ids: Ids, source: LivePath, *, budget: int, share: Share
    ) -> Node | None:
        """Store a path as far as its share permits, evicting others for it. `share`: its bytes,
        and what others keep (`Sessions.share`). Returns the last stored node, if any. Raises
        `Unstorable` if it could not be joined with the stored ones."""
        if len(ids) == 0:
            return None
        if self._layouts.get(key, source.row.layout) != source.row.layout:
            raise Unstorable(
                "a row with another KV shape or dtype than the stored ones is not kept"
            )
        root = self.roots.get(key) or new_root(self.tally)
        found = match(root, ids, len(ids))
        complete = source.row.complete and found.complete
        self.version += 1
        stored = _shared_path(found, len(ids), complete=complete)
        states, spare = ({}, {}) if complete else (source.states, source.spare)
        source = replace(source, row=source.row.stored(complete=complete))
        most, heads = share
        each = source.row.token_bytes + ID_BYTES
        stop, kept = fit(
            stored, len(ids), each, _sizes(states), _sizes(spare), prompted=source.prompted,
            complete=complete, budget=most,
        )  # fmt: skip
        if stop < len(ids) or not source.refers(stored, len(ids)):
            source = replace(source, buffers=None)
        path = _cut_back(stored, stop, kept, len(ids))
        held = {node.stop for node in path if node.snapshot is not None}
        new = {at: s for at, s in {**spare, **states}.items() if at in kept - held}
        left = budget - max(0, stop - found.shared) * each - sum(s.nbytes for s in new.values())
        if self.tally.nbytes > left:
            self.evict(nbytes=left, keep=frozenset([*path, *heads()]))
        if stop == 0:
            return None
        self.roots[key] = root
        self._layouts[key] = source.row.layout
        own = source.buffers
        for node in path:
            if own is not None and node.start >= own.first:
                set_segment(node, source.row.cut(node.start, node.stop, own))
        before = self.tally.nbytes
        parent = path[-1] if path else root
        leaf = _grow(parent, ids[:stop], source, new, continued=2 * found.shared > len(ids))
        self._clock += self.tally.nbytes - before
        self.touch(leaf)
        self.evict(buffers=self._max_buffers, keep=frozenset(leaf.path()))
        return leaf

    def offer(self, leaf: Node, at: int, state: Snapshot, *, budget: int, wanted: bool) -> None:
        """Store a state inside a message. A guess that no row has `wanted` evicts nothing."""
        if not wanted and self.tally.nbytes + state.nbytes > budget:
            return
        node = _attach(leaf, at, state, wanted=wanted)
        if node is None:
            return
        self.version += 1
        self._clock += state.nbytes
        self.evict(nbytes=budget, keep=frozenset(leaf.path()))
        if self.tally.nbytes > budget:
            set_snapshot(node, None)

    def prune(self, leaf: Node) -> None:
        """Keep at most `1 + RECENT + INSIDE` snapshots of a path: the ends of the first and the
        last messages; inside messages the most resumed, then the last ones."""
        self.version += 1
        holders = [node for node in leaf.path() if node.snapshot is not None]
        ends = _spaced([node for node in holders if not _inside(node)])
        others = sorted(filter(_inside, holders), key=lambda node: (node.resumed, node.stop))
        kept = {*ends[:1], *ends[1:][-RECENT:], *others[-INSIDE:]}
        for node in holders:
            if node not in kept:
                set_snapshot(node, None)

    # -- eviction

    def evict(
        self,
        *,
        nbytes: float = inf,
        buffers: float = inf,
        keep: frozenset[Node] = NOTHING,
    ) -> int:
        """Shrink to this many bytes and buffers, if `keep` permits. Returns the freed
        bytes. Capacity goes first if that is enough, and else last, if the entries themselves must
        stay."""
        self._drop_lost()
        before = self.tally.nbytes
        over = before - nbytes
        if over > 0 and sum(segment_of(node).slack for node in self.nodes()) >= over:
            self._trim(nbytes)
        held = self.tally.nbytes
        while self.tally.nbytes > nbytes or self.tally.buffers > buffers:
            evict(
                self.roots.values(), self.tally, nbytes=nbytes, buffers=buffers, clock=self._clock,
                keep=keep,
            )  # fmt: skip
            self.version += 1
            self._drop_empty()
            self._copy_out()
            if self.tally.nbytes == held:
                break
            held = self.tally.nbytes  # more may go, now that no entry refers to it
        self._trim(nbytes)
        freed = before - self.tally.nbytes
        self.evicted_bytes += freed
        return freed

    def clear(self) -> None:
        for root in self.roots.values():
            for node in list(root.children.values()):
                remove_below(node)  # or the memory waits for the collector, as nodes form cycles
        self._drop_empty()
        self.recount()

    def _drop_empty(self) -> None:
        self.roots = {key: root for key, root in self.roots.items() if root.children}
        self._layouts = {key: shape for key, shape in self._layouts.items() if key in self.roots}

    def _drop_lost(self) -> None:
        for lost in [each for each in self._buffers() if each.lost and each.stored]:
            for node in self.nodes_in(lost)[:1]:
                remove_below(node)
            self._drop_empty()
            self.recount()

    def _trim(self, nbytes: float) -> None:
        """Free capacity after entries, least recently used first."""
        if self.tally.nbytes <= nbytes:
            return
        spare = [node for node in self.nodes() if segment_of(node).slack]
        for node in sorted(spare, key=lambda node: node.used):
            segment = segment_of(node)
            if segment.held is not None and self.tally.nbytes > nbytes:
                segment.held.trim(node.stop)
                set_segment(node, replace(segment, slack=0))

    def _copy_out(self) -> None:
        """Free buffers of which a part was evicted. Copies the other tokens, layer by layer."""
        stored = self._stored()
        for each in self._buffers():
            left = stored.get(each, 0)
            if left and left != each.stored and not each.needed:
                _to_packs(each, self.nodes_in(each))
        self.recount()

    # -- buffers of rows

    def know(self, buffers: RowBuffers) -> None:
        still = (ref for ref in self._known if ref() is not None)
        self._known = (*still, weakref.ref(buffers))

    @property
    def in_use(self) -> int:
        """Bytes that rows use, which cannot be evicted. Any thread may ask."""
        return sum(each.stored for each in self._buffers() if each.in_use)

    def nodes_in(self, buffers: RowBuffers) -> list[Node]:
        """First tokens first."""
        found = [node for node in self.nodes() if segment_of(node).held is buffers]
        return sorted(found, key=lambda node: node.start)

    def recount(self) -> None:
        """Segments have moved to other buffers, or out of them."""
        self.version += 1
        stored = self._stored()
        for each in self._buffers():
            each.stored = stored.get(each, 0)

    def use_slack(self, buffers: RowBuffers) -> None:
        """A row uses the capacity after the last token of its buffers."""
        for node in self.nodes_in(buffers):
            set_segment(node, replace(segment_of(node), slack=0))
        self.recount()

    def park(self, buffers: RowBuffers, budget: int) -> None:
        """No row uses these buffers now. Their capacity counts, or is freed if it does not fit."""
        found = self.nodes_in(buffers)
        slack = buffers.slack(found[-1].stop) if found else 0
        if slack and self.tally.nbytes + slack > budget:
            buffers.trim(found[-1].stop)
        elif slack:
            set_segment(found[-1], replace(segment_of(found[-1]), slack=slack))
        self.recount()

    def _buffers(self) -> list[RowBuffers]:
        return [each for ref in self._known if (each := ref()) is not None]

    def _stored(self) -> dict[RowBuffers, int]:
        stored: dict[RowBuffers, int] = {}
        for node in self.nodes():
            segment = segment_of(node)
            if segment.held is not None:
                own = segment.nbytes - segment.slack
                stored[segment.held] = stored.get(segment.held, 0) + own
        return stored

    def check_integrity(self) -> None:
        total = sum(check(root) for root in self.roots.values())
        if total != self.tally.nbytes:
            raise AssertionError(f"counts {self.tally.nbytes} bytes, holds {total}")
        buffers = sum(node.buffers for node in self.nodes())
        if buffers != self.tally.buffers:
            raise AssertionError(f"counts {self.tally.buffers} buffers, holds {buffers}")
        if any(not root.children for root in self.roots.values()):
            raise AssertionError("an empty tree is kept")
        stored = self._stored()
        if any(each.stored != stored.get(each, 0) for each in self._buffers()):
            raise AssertionError("the bytes of a row's buffers are not those of its segments")


def _shared_path(found: Match, length: int, *, complete: bool) -> list[Node]:
    """The stored nodes of the path. The last node is split where the path leaves it."""
    path = [node for node, _ in found.steps]
    agreed = found.steps[-1][1] if path else 0
    if path and agreed < len(path[-1].tokens) and not (complete and found.shared == length):
        path[-1] = split(path[-1], agreed)
    return path


def _cut_back(path: Sequence[Node], stop: int, kept: Set[int], length: int) -> list[Node]:
    """The stored nodes of a head, with the snapshots that it keeps. `length`: tokens of the whole
    path. A shorter head ends in a snapshot that is not a guess."""
    nodes = [node for node in path if node.start < stop]
    if nodes and stop < nodes[-1].stop and stop < length:
        nodes[-1] = split(nodes[-1], stop - nodes[-1].start)
    for node in nodes:
        if node.snapshot is not None and node.stop not in kept:
            set_snapshot(node, None)
    if nodes and nodes[-1].guessed and stop < length:
        nodes[-1].resumed = 1
    return nodes


def _grow(
    parent: Node, ids: Ids, source: LivePath, states: Mapping[int, Snapshot], *, continued: bool
) -> Node:
    """Add tokens `[parent.stop, len(ids))` below `parent`, and states. Returns the last node."""
    first, stop = parent.stop, len(ids)
    edges = range(-(-first // MAX_EDGE) * MAX_EDGE, stop, MAX_EDGE)
    inner = {at for at in {source.prompted, *states, *edges} if first < at < stop}
    cuts = sorted({first, *inner, stop}) if first < stop else []
    for start, end in pairwise(cuts):
        segment = source.row.cut(start, end, source.buffers)
        parent = add(parent, ids[start:end], segment, complete=source.row.complete)
        # a conversation that continues may continue again
        parent.hits, parent.generated = int(continued), start >= source.prompted
    for at, state in states.items():
        _attach(parent, at, replace(state, inside=False))
    return parent


def _attach(leaf: Node, at: int, state: Snapshot, *, wanted: bool = False) -> Node | None:
    """Attach a state at token `at` of the path. Returns its node, if that had no state. `wanted`: a
    row would have resumed there."""
    node = next((node for node in leaf.path() if node.start < at <= node.stop), None)
    if node is None or node.complete:
        return None
    if at < node.stop:
        node = split(node, at - node.start)
    if node.snapshot is not None:
        return None
    set_snapshot(node, state)
    node.resumed = int(wanted)
    return node


def _spaced(holders: list[Node]) -> list[Node]:
    """Remove snapshots that save almost nothing, except the last. The snapshot at the end of the
    prompt is one, right after that of the last message, once the path continues."""
    spaced = holders[:1]
    for node in holders[1:]:
        if node.stop - spaced[-1].stop >= NEAR or node is holders[-1]:
            spaced.append(node)
    return spaced


def _inside(holder: Node) -> bool:
    return holder.snapshot is not None and holder.snapshot.inside


def _to_packs(buffers: RowBuffers, held: Sequence[Node]) -> None:
    spans = [(node.start, node.stop) for node in held]
    layers = segment_of(held[0]).layers
    copies = [buffers.pieces(leaf, spans) for leaf, count in layers if count]
    for i, node in enumerate(held):
        arrays = [array for leaf in copies for array in leaf[i]]
        pack = ArrayPack.loose(arrays)
        set_segment(node, replace(segment_of(node), pack=pack, held=None, start=0, slack=0))


def _sizes(states: Mapping[int, Snapshot]) -> dict[int, int]:
    return {at: state.nbytes for at, state in states.items()}
