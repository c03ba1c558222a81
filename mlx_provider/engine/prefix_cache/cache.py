"""The prefix cache: stores the KV and states of prefixes for later requests.

    match = prefix_cache.match(key, ids, limit=len(ids) - 1)
    cache, _ = prefix_cache.acquire(match, model.make_cache)  # tokens [0, match.length)
    ... prefill the rest, at message ends: snapshots[n] = prefix_cache.snapshot(cache)
    prefix_cache.insert(key, ids_the_cache_holds, cache, snapshots)
    prefix_cache.evict(nbytes)

Stored tokens never change: rows copy them, or append to the buffers of an entry (`Leases`). A
`Match` is valid only while `holds` is true for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

from ...protocol.health import PrefixCacheStats, PrefixNode
from ..memory import MemoryProfile
from ..row_cache import Kind, Unstorable, grow_by, strictest
from . import tree
from .buffers import Lease, Leases, RowBuffers
from .disk import DiskTier
from .eviction import Sessions, evict, fit
from .segments import RowFiller, RowParts, Snapshot, row_parts, take_snapshot
from .tree import ID_BYTES, CacheKey, Ids, Match, Node, as_ids, key_tokens, segment_of

__all__ = ["CacheKey", "Match", "PrefixCache", "key_tokens"]

log = logging.getLogger(__name__)

MAX_BUFFERS = 250_000
"""Half of the 499,000 at which MLX raises on Metal (mlx 0.32, backend/metal/allocator.cpp,
`device_info()["resource_limit"]`). Weights, passes and rows (two to six per layer) need the
rest."""
SPARE_SHARE = 4
"""A continued conversation may get this fraction (1/n) of the free budget for later turns."""
MAX_OUTLINED = 40
COUNTED = (
    "lookups", "prompt_tokens", "reused_tokens", "restored_tokens", "refused", "evicted_bytes",
)  # fmt: skip


class PrefixCache:
    """One tree per key. Engine thread only, except where it says so."""

    def __init__(
        self,
        *,
        budget: Callable[[], int],
        disk: DiskTier | None = None,
        max_buffers: int = MAX_BUFFERS,
    ) -> None:
        """`budget()`: bytes that the prefix cache may use now."""
        self.disk = disk
        self.budget = budget
        self.nbytes = self.buffers = 0
        """Any thread may ask."""
        self._roots: dict[CacheKey, Node] = {}
        self._layouts: dict[CacheKey, tuple[Any, ...]] = {}
        self._max_buffers = max_buffers
        self._held: tuple[RowBuffers, ...] = ()
        """Those to which entries refer."""
        self._version = 0
        self._clock = 0
        """Bytes stored so far, plus one per use."""
        self._sessions = Sessions()
        self._counted = dict.fromkeys(COUNTED, 0)
        self._warned: set[str] = set()

    @property
    def in_use(self) -> int:
        """Bytes that rows use, which cannot be evicted. Any thread may ask."""
        return sum(each.stored for each in self._held if each.in_use)

    def nodes(self) -> Iterator[Node]:
        return chain.from_iterable(map(tree.nodes, self._roots.values()))

    def match(self, key: CacheKey, tokens: Sequence[int] | Ids, limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens. It never ends inside a media span.
        `tokens` are key ids (`key_tokens`); an int64 array avoids the conversion. Changes
        nothing."""
        root = self._roots.get(key) or tree.new_root()
        return tree.match(root, as_ids(tokens), limit, self._version)

    def holds(self, match: Match) -> bool:
        return match.version == self._version and not any(node.lost for node, _ in match.steps)

    def acquire(
        self,
        match: Match,
        make_cache: Callable[[], list[Any]],
        *,
        room: int = 0,
        leases: Leases | None = None,
    ) -> tuple[list[Any], Lease | None]:
        """A fresh row cache with the first `match.length` tokens, and capacity for `room` more.

        `leases`: the row uses the buffers of the entry, if no other row does; `None`: it copies.
        Call it once per row, also for length 0: it counts the look-up. Raises `ValueError` if the
        match is no longer valid, or `make_cache` makes another kind of cache than the stored one.
        """
        if not self.holds(match):
            raise ValueError("the prefix cache has changed since the match")
        cache = make_cache()
        lease, in_place = None, dict[int, int]()
        if leases is not None:
            spare = max(0, self.budget() - self.nbytes) // SPARE_SHARE
            lease, in_place = leases.begin(match, cache, room, spare)
        if match.length:
            state = match.stateful.snapshot if match.stateful else None
            filler = RowFiller(cache, match.length, room, state.layers if state else (), in_place)
            for node in match.path:
                stop = min(node.stop, match.length)
                filler.put(segment_of(node).arrays(), node.start, stop, 0)
            filler.finish(match.length, state)
        elif room:
            grow_by(cache, room)
        self.count(match)
        return cache, lease

    def save_head(self, key: CacheKey, ids: Ids, cache: list[Any], start: int) -> None:
        """Write a row to disk during its prefill, if the disk is fast enough. The last pass
        computed the tokens of `ids` from `start` on."""
        if self.disk is not None and self.disk.due(start, len(ids)):
            try:
                self.disk.save(key, ids, row_parts(cache, len(ids)), {})
            except Unstorable as reason:
                self._warn(reason)

    def fits(self, memory: MemoryProfile, session: str | None) -> int:
        """Tokens of such a row, with the state at their end, that fit the session's share."""
        windows = sum(window * each for window, each in memory.windows)
        # a window is stored twice: in the segments until it wraps, and in the state
        share, _ = self._sessions.share(session, self.budget())
        room = share - memory.state_bytes - 2 * windows
        return max(0, room // (memory.token_bytes + ID_BYTES))

    def count(self, match: Match, restored: int = 0) -> None:
        """Count a look-up. `restored`: tokens that came from disk, if it had more."""
        for node in self._touch(match.path[-1] if match.path else None):
            node.hits += 1
        if match.stateful is not None:
            match.stateful.resumed += 1
        if match.counted:
            self._counted["lookups"] += 1
            self._counted["prompt_tokens"] += match.asked
            self._counted["reused_tokens"] += restored or match.length
            self._counted["restored_tokens"] += restored

    def _touch(self, leaf: Node | None) -> list[Node]:
        """The path of a leaf, which is in use now."""
        self._clock += 1
        path = [] if leaf is None else leaf.path()
        for node in path:
            node.used = self._clock
        return path

    def strictest(self, cache: list[Any]) -> Kind:
        """APPEND for a row that cannot be stored."""
        try:
            return strictest(cache)
        except Unstorable as reason:
            self._warn(reason)
            return Kind.APPEND

    def snapshot(
        self, cache: list[Any], at: int | None = None, *, inside: bool = False
    ) -> Snapshot | None:
        """A copy of the states and windows, which cannot be cut out of a longer row later. `at`:
        their value after that many tokens (see `take_snapshot`). `inside`: not at a message end, so
        it is evicted first. `None` if every layer can be cut at any token, or none is possible."""
        try:
            found = take_snapshot(cache, at)
        except (Unstorable, ValueError) as reason:
            self._warn(reason)
            return None
        return None if found is None else replace(found, inside=inside)

    def insert(
        self,
        key: CacheKey,
        tokens: Sequence[int] | Ids,
        cache: list[Any],
        snapshots: Mapping[int, Snapshot],
        *,
        prompted: int | None = None,
        session: str | None = None,
        awaited: bool = False,
        beyond: bool = False,
        lease: Lease | None = None,
    ) -> int:
        """Store a row, evicting others. Returns how many of its tokens are stored then.

        `tokens`: all tokens in the cache, as key ids. `lease`: the row's buffers, to which the
        entry can refer; `None`: it copies. `snapshots`: by token count; those inside messages are
        stored only if nothing more valuable is evicted for them. `prompted`: tokens before the
        reply, if it is included. `awaited`: the next request of the session will come. `beyond`:
        the cache holds more tokens, which a cache with only states does not show.

        An entry larger than the budget is stored as far as it fits, a cache of an unknown kind not
        at all. Raises `ValueError` if the cache holds fewer tokens.
        """
        ids = as_ids(tokens)
        self._drop_lost()
        own = None if lease is None else lease.own_of(cache)
        ends = {n: s for n, s in snapshots.items() if 0 < n <= len(ids) and not s.inside}
        inside = {n: s for n, s in snapshots.items() if n <= len(ids) and s.inside}
        leaf, shared, budget = None, 0, 0
        try:
            row = row_parts(cache, len(ids))
            exact = row.exact and not beyond
            if not exact and not row.complete:  # its state belongs to a later token
                ids = ids[: max(ends, default=0)]
            prompted = row.length if prompted is None else prompted
            if own is not None:  # what the cache counts is no longer the row's
                nbytes = (len(ids) - own.first) * row.stored(complete=False).token_bytes
                own.stored, self._held = max(own.stored, nbytes), (*self._held, own)
            found = self.match(key, ids, len(ids))
            shared, complete = found.shared, row.complete and found.complete
            last = take_snapshot(cache) if exact and not complete else None
            states = ends if last is None else {**ends, row.length: last}
            states, spare = ({}, {}) if complete else (states, inside)
            budget = self.budget()
            if len(ids):
                leaf = self._add(
                    key, ids, row, found, states, spare, prompted=prompted, own=own,
                    share=self._sessions.share(session, budget), budget=budget,
                )  # fmt: skip
            if self.disk is not None:  # of the states inside messages, those that rows wanted
                states |= {at: state for at, state in spare.items() if at <= shared}
                self.disk.save(key, ids, row, states, prompted=prompted)
        except Unstorable as reason:
            self._warn(reason)
        finally:
            self.recount()
        if leaf is None:
            self._counted["refused"] += 1
            return 0
        for at in sorted(inside, reverse=True):
            self._offer(leaf, at, inside[at], budget, wanted=at <= shared)
        if tree.prune(leaf):
            self.recount()
        self.evict(buffers=self._max_buffers, keep=leaf.path())
        if session is not None:
            each = row.stored(complete=row.complete).token_bytes + ID_BYTES
            self._sessions.pin(session, leaf, len(ids) * each, awaited=awaited)
        return min(leaf.stop, len(ids))

    def _add(
        self,
        key: CacheKey,
        ids: Ids,
        row: RowParts,
        found: Match,
        states: Mapping[int, Snapshot],
        spare: Mapping[int, Snapshot],
        *,
        prompted: int,
        own: RowBuffers | None,
        share: tuple[int, Callable[[], list[Node]]],
        budget: int,
    ) -> Node | None:
        """Store a path as far as its share permits, evicting others for it. `spare`: snapshots that
        may only end a path that is stored in part. `share`: its bytes, and what others keep
        (`Sessions.share`). Returns the last stored node, if any. Raises `Unstorable` if it could
        not be joined with the stored ones."""
        if self._layouts.get(key, row.layout) != row.layout:
            raise Unstorable(
                "a row with another KV shape or dtype than the stored ones is not kept"
            )
        root, layout = self._roots.get(key) or tree.new_root(), row.layout
        complete = row.complete and found.complete
        row = row.stored(complete=complete)
        stored = tree.shared_path(found, len(ids), complete=complete)
        each, (most, heads) = row.token_bytes + ID_BYTES, share
        stop, kept = fit(
            stored, len(ids), each, states, spare, prompted=prompted, complete=complete, budget=most
        )
        if stop < len(ids) or not tree.refers(own, row, stored, len(ids)):
            own = None
        path = tree.cut_back(stored, stop, kept, len(ids))
        held = {node.stop for node in path if node.snapshot is not None}
        new = {at: s for at, s in {**spare, **states}.items() if at in kept - held}
        grows = max(0, stop - found.shared) * each + sum(s.nbytes for s in new.values())
        if self.nbytes > budget - grows:
            self.recount()  # without the snapshots that were cut back
        if self.nbytes > budget - grows:
            self.evict(budget - grows, keep={*path, *heads()})
        if stop == 0:
            return None
        self._roots[key], self._layouts[key] = root, layout
        for node in path:
            if own is not None and node.start >= own.first:
                node.segment = row.cut(node.start, node.stop, own)
        leaf = tree.grow(
            path[-1] if path else root, ids[:stop], row, new, prompted=prompted, own=own,
            continued=2 * found.shared > len(ids),
        )  # fmt: skip
        self._clock += grows
        self._touch(leaf)
        return leaf

    def _offer(self, leaf: Node, at: int, state: Snapshot, budget: int, *, wanted: bool) -> None:
        """Store a state inside a message. A guess that no row has `wanted` evicts nothing."""
        if not wanted and self.nbytes + state.nbytes > budget:
            return
        node = tree.attach(leaf, at, state, wanted=wanted)
        if node is not None:
            self._clock += state.nbytes
            self.recount()
            self.evict(budget, keep=leaf.path())
            if self.nbytes > budget:
                node.snapshot = None
                self.recount()

    def evict(
        self, nbytes: float = inf, *, buffers: float = inf, keep: Collection[Node] = ()
    ) -> int:
        """Shrink to this many bytes and buffers, if rows and `keep` permit. Returns the freed
        bytes. Capacity goes first if that is enough, and else last, if the entries themselves must
        stay."""
        self._drop_lost()
        before = self.nbytes
        if 0 < before - nbytes <= sum(segment_of(node).slack for node in self.nodes()):
            self._trim(nbytes)
        held = 0
        while (self.nbytes > nbytes or self.buffers > buffers) and held != self.nbytes:
            held = self.nbytes  # more may go, once no entry refers to it
            over = held - nbytes, self.buffers - buffers
            evict([*self.nodes()], *over, clock=self._clock, keep=frozenset(keep))
            for each, left in self._nodes_of_buffers().items():
                stored = sum(segment_of(node).stored for node in left)
                if stored != each.stored and not each.needed:
                    each.copy_out(sorted(left, key=lambda node: node.start))
            self.recount()
        self._trim(nbytes)
        freed = before - self.nbytes
        self._counted["evicted_bytes"] += freed
        return freed

    def _trim(self, nbytes: float) -> None:
        """Free capacity after entries, least recently used first."""
        over = self.nbytes - nbytes
        spare = [node for node in self.nodes() if segment_of(node).slack] if over > 0 else []
        for node in sorted(spare, key=lambda node: node.used):
            segment = segment_of(node)
            if segment.held is not None and over > 0:
                segment.held.trim(node.stop)
                node.segment, over = replace(segment, slack=0), over - segment.slack
        if spare:
            self.recount()

    def _drop_lost(self) -> None:
        for each in [each for each in self._held if each.lost and each.stored]:
            for node in self.nodes_in(each)[:1]:
                tree.remove(node)
            self.recount()

    def clear(self) -> None:
        for node in [node for root in self._roots.values() for node in root.children.values()]:
            tree.remove(node)  # or the memory waits for the collector, as nodes form cycles
        self.recount()
        self._sessions.clear()
        if self.disk is not None:
            self.disk.clear()

    # -- buffers of rows

    def nodes_in(self, buffers: RowBuffers) -> list[Node]:
        """First tokens first."""
        found = self._nodes_of_buffers().get(buffers, [])
        return sorted(found, key=lambda node: node.start)

    def _nodes_of_buffers(self) -> dict[RowBuffers, list[Node]]:
        found: dict[RowBuffers, list[Node]] = {}
        for node in self.nodes():
            held = segment_of(node).held
            if held is not None:
                found.setdefault(held, []).append(node)
        return found

    def recount(self) -> None:
        """Call it after any change: all matches are outdated."""
        self._version += 1
        self._roots = {key: root for key, root in self._roots.items() if root.children}
        self._layouts = {key: self._layouts[key] for key in self._roots}
        self.nbytes, self.buffers, stored = self._sums()
        for each in {*self._held, *stored}:
            each.stored = stored.get(each, 0)
        self._held = tuple(stored)

    def _sums(self) -> tuple[int, int, dict[RowBuffers, int]]:
        """Bytes, device buffers, and bytes in the buffers of each row."""
        nbytes, buffers, held = 0, 0, dict[RowBuffers, int]()
        for node in self.nodes():  # without their properties: it runs for each row, over all nodes
            segment, snapshot = segment_of(node), node.snapshot
            stored = segment.length * segment.token_bytes
            nbytes += segment.length * ID_BYTES + stored + segment.slack
            buffers += segment.buffers
            if snapshot is not None:
                nbytes, buffers = nbytes + snapshot.nbytes, buffers + snapshot.buffers
            if segment.held is not None:
                held[segment.held] = held.get(segment.held, 0) + stored
        return nbytes, buffers, held

    def close(self) -> None:
        """Wait until the disk tier has written its queue."""
        if self.disk is not None:
            self.disk.writer.close()

    def report(self) -> dict[str, Any]:
        every, counted = list(self.nodes()), self._counted
        return {
            "entries": sum(not node.children for node in every),
            "nodes": len(every),
            "snapshots": sum(node.snapshot is not None for node in every),
            "tokens": sum(len(node.tokens) for node in every),
            "bytes": self.nbytes,
            "buffers": self.buffers,
            "budget": self.budget(),
            **counted,
            "hit_rate": counted["reused_tokens"] / max(1, counted["prompt_tokens"]),
            "sessions": len(self._sessions),
            "disk": None if self.disk is None else self.disk.report(),
        }

    def stats(self) -> PrefixCacheStats:
        found = self.report()
        disk = found["disk"] or {"bytes": 0, "limit": 0}
        known = PrefixCacheStats.model_fields.keys() & found.keys()
        return PrefixCacheStats(
            **{name: found[name] for name in known},
            disk_bytes=disk["bytes"],
            disk_limit=disk["limit"],
            tree=_outline(self._roots.values()),
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless bytes, references and pins are consistent."""
        for root in self._roots.values():
            tree.check(root)
            if not root.children:
                raise AssertionError("an empty tree is kept")
        counted = self._sums()
        if counted != (self.nbytes, self.buffers, {each: each.stored for each in self._held}):
            raise AssertionError(f"holds {counted}, counts {self.nbytes}, {self.buffers}")
        if any(name not in self._sessions for node in self.nodes() for name in node.sessions):
            raise AssertionError("a node is pinned by an unknown session")

    def _warn(self, reason: Exception) -> None:
        """Once."""
        if str(reason) not in self._warned:
            self._warned.add(str(reason))
            log.warning("prefix cache: %s", reason)


def _outline(roots: Iterable[Node]) -> list[PrefixNode]:
    """At most `MAX_OUTLINED` nodes, parents before children, most recently used first."""
    found: list[PrefixNode] = []
    todo = [(0, node) for root in roots for node in root.children.values()]
    todo.sort(key=_age)
    while todo and len(found) < MAX_OUTLINED:
        depth, node = todo.pop()
        found.append(
            PrefixNode(
                depth=depth,
                start=node.start,
                tokens=len(node.tokens),
                bytes=node.nbytes,
                hits=node.hits,
                resumable=node.complete or node.snapshot is not None,
            )
        )
        todo += sorted(((depth + 1, child) for child in node.children.values()), key=_age)
    return found


def _age(placed: tuple[int, Node]) -> int:
    return placed[1].used
