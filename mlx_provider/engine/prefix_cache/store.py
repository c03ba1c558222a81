"""The stored paths of all keys, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from .eviction import evict, value
from .fitting import fit
from .insertion import LivePath, attach, cut_back, grow, grows_complete, prune, shared_path
from .key import CacheKey, Ids
from .sessions import Share, head
from .snapshots import Snapshot
from .tree import Node, Tally, Walk, check, new_root, nodes, set_snapshot, walk

Layout = tuple[Any, ...]
NOTHING: frozenset[Node] = frozenset()


class Store:
    """One tree per key. No method keeps more than `budget` bytes or `max_buffers` buffers."""

    def __init__(self, max_buffers: int) -> None:
        self.tally = Tally()
        self.version = 0
        """Changes whenever a match could change."""
        self.evicted_bytes = 0
        self.roots: dict[CacheKey, Node] = {}
        self._layouts: dict[CacheKey, Layout] = {}
        self._max_buffers = max_buffers
        self._clock = 0
        """Bytes stored so far, plus one per use."""

    def walk(self, key: CacheKey, ids: Ids) -> Walk:
        return walk(self.roots.get(key) or new_root(), ids, len(ids))

    def nodes(self) -> Iterator[Node]:
        return (node for root in self.roots.values() for node in nodes(root))

    def touch(self, leaf: Node | None) -> list[Node]:
        """Mark the path to `leaf` as used now. Returns its nodes."""
        self._clock += 1
        path = [] if leaf is None else leaf.path()
        for node in path:
            node.used = self._clock
        return path

    def fits_layout(self, key: CacheKey, layout: Layout) -> bool:
        """Whether segments of this layout can be joined with those stored under the key."""
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
        """Store a path as far as its share permits, evicting others for it. Returns the last node
        that is stored, if any."""
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
        path = cut_back(stored, kept, len(ids))
        if self.tally.nbytes > budget - kept.new_bytes:
            heads = (node for leaf in share.siblings for node in head(leaf, share.equal))
            self.evict(nbytes=budget - kept.new_bytes, keep=frozenset([*path, *heads]))
        if kept.stop == 0:
            return None
        self.roots[key] = root
        self._layouts[key] = layout
        before = self.tally.nbytes
        parent = path[-1] if path else root
        leaf = grow(parent, ids, source, kept, complete=complete, shared=found.shared)
        self._clock += self.tally.nbytes - before
        self.touch(leaf)
        self.evict(buffers=self._max_buffers, keep=frozenset(leaf.path()))
        return leaf

    def offer(self, leaf: Node, at: int, state: Snapshot, *, budget: int, wanted: bool) -> None:
        """Store a state inside a message, unless everything that could be evicted for it is worth
        more."""
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
        """Drop the excess snapshots of a path."""
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
        bytes."""
        before = self.tally.nbytes
        if before <= nbytes and self.tally.buffers <= buffers:
            return 0
        evict(
            self.roots.values(), self.tally, nbytes=nbytes, buffers=buffers, clock=self._clock,
            keep=keep, below=below,
        )  # fmt: skip
        self.version += 1
        self.roots = {key: root for key, root in self.roots.items() if root.children}
        self._layouts = {key: shape for key, shape in self._layouts.items() if key in self.roots}
        self.evicted_bytes += before - self.tally.nbytes
        return before - self.tally.nbytes

    def clear(self) -> None:
        self.version += 1
        self.tally = Tally()
        self.roots.clear()
        self._layouts.clear()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the counts and the trees are consistent."""
        total = sum(check(root) for root in self.roots.values())
        if total != self.tally.nbytes:
            raise AssertionError(f"counts {self.tally.nbytes} bytes, holds {total}")
        buffers = sum(node.buffers for node in self.nodes())
        if buffers != self.tally.buffers:
            raise AssertionError(f"counts {self.tally.buffers} buffers, holds {buffers}")
        if any(not root.children for root in self.roots.values()):
            raise AssertionError("an empty tree is kept")


def _sizes(states: Mapping[int, Snapshot]) -> dict[int, int]:
    return {at: state.nbytes for at, state in states.items()}
