"""The stored paths of all keys, and their sizes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from .buffers import RowBuffers
from .eviction import Share, evict, fit, head, value
from .insertion import (
    LivePath,
    attach,
    cut_back,
    grow,
    grows_complete,
    prune,
    refer,
    refers,
    shared_path,
)
from .segments import segment_of
from .snapshots import Snapshot
from .tree import (
    CacheKey,
    Ids,
    Node,
    Tally,
    Walk,
    check,
    new_root,
    nodes,
    remove_below,
    set_segment,
    set_snapshot,
    walk,
)

Layout = tuple[Any, ...]
NOTHING: frozenset[Node] = frozenset()


class Store:
    """One tree per key. No method keeps more than `budget` bytes or `max_buffers` buffers."""

    def __init__(self, max_buffers: int) -> None:
        self.tally = Tally()
        self.version = 0
        self.evicted_bytes = 0
        self.roots: dict[CacheKey, Node] = {}
        self._layouts: dict[CacheKey, Layout] = {}
        self._max_buffers = max_buffers
        self._known: tuple[weakref.ref[RowBuffers], ...] = ()
        self._clock = 0
        """Bytes stored so far, plus one per use."""

    # -- buffers of rows

    def know(self, buffers: RowBuffers | None) -> None:
        if buffers is not None:
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

    def move(self, base: RowBuffers, own: RowBuffers) -> None:
        """Buffers have got copies of the prefix before them. Segments move there, unless others
        need the prefix."""
        last, own.first, own.base = own.first, 0, None
        for node in () if base.in_use else self.nodes_in(base):
            if node.stop <= last:
                set_segment(node, segment_of(node).moved_to(own))
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

    def _spare(self) -> list[Node]:
        found = [node for node in self.nodes() if segment_of(node).slack]
        return sorted(found, key=lambda node: node.used)

    def _trim(self, nbytes: float) -> None:
        if self.tally.nbytes <= nbytes:
            return
        for node in self._spare():
            segment = segment_of(node)
            if segment.held is not None and self.tally.nbytes > nbytes:
                segment.held.trim(node.stop)
                set_segment(node, replace(segment, slack=0))

    def _drop_lost(self) -> None:
        for lost in [each for each in self._buffers() if each.lost and each.stored]:
            top = self.nodes_in(lost)[:1]
            for node in top:
                remove_below(node)
            self._drop_empty()
            self.recount()

    def _copy_out(self) -> None:
        """Free buffers of which a part was evicted. Copies the other tokens, layer by layer."""
        stored = self._stored()
        for each in self._buffers():
            left = stored.get(each, 0)
            if left and left != each.stored and not each.needed:
                _to_packs(each, self.nodes_in(each))
        self.recount()

    def _drop_empty(self) -> None:
        self.roots = {key: root for key, root in self.roots.items() if root.children}
        self._layouts = {key: shape for key, shape in self._layouts.items() if key in self.roots}

    # -- paths

    def walk(self, key: CacheKey, ids: Ids) -> Walk:
        self._drop_lost()
        return walk(self.roots.get(key) or new_root(), ids, len(ids))

    def nodes(self) -> Iterator[Node]:
        return (node for root in self.roots.values() for node in nodes(root))

    def touch(self, leaf: Node | None) -> list[Node]:
        self._clock += 1
        path = [] if leaf is None else leaf.path()
        for node in path:
            node.used = self._clock
        return path

    def fits_layout(self, key: CacheKey, layout: Layout) -> bool:
        return self._layouts.get(key, layout) == layout

    def add(
        self,
        key: CacheKey,
        ids: Ids,
        source: LivePath,
        *,
        budget: int,
        share: Share,
        layout: Layout,
    ) -> Node | None:
        """Store a path as far as its share permits, evicting others for it. Returns the last
        stored node, if any."""
        if len(ids) == 0:
            return None
        root = self.roots.get(key) or new_root(self.tally)
        found = walk(root, ids, len(ids))
        complete = grows_complete(found, source)
        self.version += 1
        stored = shared_path(found, len(ids), complete=complete)
        kept = fit(
            stored, len(ids), source.row.token_bytes(complete=complete),
            {} if complete else _sizes(source.states), {} if complete else _sizes(source.spare),
            prompted=source.prompted, complete=complete, budget=share.nbytes,
        )  # fmt: skip
        if kept.stop < len(ids) or not refers(source, stored, len(ids), complete=complete):
            source = replace(source, buffers=None)
        path = cut_back(stored, kept, len(ids))
        if self.tally.nbytes > budget - kept.new_bytes:
            heads = (node for leaf in share.siblings for node in head(leaf, share.equal))
            self.evict(nbytes=budget - kept.new_bytes, keep=frozenset([*path, *heads]))
        if kept.stop == 0:
            return None
        self.roots[key] = root
        self._layouts[key] = layout
        refer(source, path)
        before = self.tally.nbytes
        parent = path[-1] if path else root
        leaf = grow(parent, ids, source, kept, complete=complete, shared=found.shared)
        self._clock += self.tally.nbytes - before
        self.touch(leaf)
        self.evict(buffers=self._max_buffers, keep=frozenset(leaf.path()))
        return leaf

    def offer(self, leaf: Node, at: int, state: Snapshot, *, budget: int, wanted: bool) -> None:
        """Store a state inside a message, unless what must be evicted for it is worth more."""
        node = attach(leaf, at, state, wanted=wanted)
        if node is None:
            return
        self.version += 1
        self._clock += state.nbytes
        worth = value(node, self._clock, self.tally.nbytes)
        self.evict(nbytes=budget, keep=frozenset(leaf.path()), below=worth)
        if self.tally.nbytes > budget:
            set_snapshot(node, None)

    def prune(self, leaf: Node) -> None:
        self.version += 1
        prune(leaf)

    def evict(
        self,
        *,
        nbytes: float = inf,
        buffers: float = inf,
        keep: frozenset[Node] = NOTHING,
        below: float = inf,
    ) -> int:
        """Shrink to this many bytes and buffers, if `keep` and `below` permit. Returns the freed
        bytes. Capacity goes first if that is enough, and else last, if the entries themselves must
        stay."""
        self._drop_lost()
        before = self.tally.nbytes
        over = before - nbytes
        if over > 0 and sum(segment_of(node).slack for node in self._spare()) >= over:
            self._trim(nbytes)
        held = self.tally.nbytes
        while self.tally.nbytes > nbytes or self.tally.buffers > buffers:
            evict(
                self.roots.values(), self.tally, nbytes=nbytes, buffers=buffers, clock=self._clock,
                keep=keep, below=below,
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


def _to_packs(buffers: RowBuffers, held: Sequence[Node]) -> None:
    spans = [(node.start, node.stop) for node in held]
    layers = segment_of(held[0]).layers
    copies = [buffers.pieces(leaf, spans) for leaf, count in layers if count]
    for i, node in enumerate(held):
        arrays = [array for leaf in copies for array in leaf[i]]
        set_segment(node, segment_of(node).loose(arrays))


def _sizes(states: Mapping[int, Snapshot]) -> dict[int, int]:
    return {at: state.nbytes for at, state in states.items()}
