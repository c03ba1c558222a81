"""The prefix cache: stores the KV and states of prefixes for later requests.

    match = prefix_cache.match(key, ids, limit=len(ids) - 1)
    cache, lease = prefix_cache.acquire(match, model.make_cache, reuse=reuse)
    ... prefill [match.length, len(ids)); at message ends: states[n] = prefix_cache.snapshot(cache)
    prefix_cache.insert(key, ids_the_cache_holds, cache, states, lease=lease)
    prefix_cache.release(lease)
    prefix_cache.evict(limit)

The engine calls these through `PrefixCachePolicy`: `look_up` and `offers` match, `begin` acquires,
`keep_prefill` and `keep_row` insert, which evicts for itself. `serving.RowLedger` evicts for rows.

Stored tokens never change: rows copy or share them, or append to an entry (`Reuse`). After a
change of the tree, a `Match` is no longer valid (`is_valid`)."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any

from ...protocol.health import PrefixCacheStats
from ..row_cache import Unstorable, grow_by
from ..scheduling.ledger import MemoryProfile
from . import tree
from .buffers import Lease, Reuse, RowBuffers
from .disk import DiskTier
from .eviction import Sessions, fit_path, shrink
from .handover import Totals, budget_after, leave_in_place
from .segments import RowFiller, Snapshot, row_segment, take_snapshot
from .snapshots import prune
from .tree import ID_BYTES, CacheKey, Ids, Match, NewPath, Node, as_ids, segment_of

log = logging.getLogger(__name__)

MAX_BUFFERS = 250_000
"""Half of the 499,000 at which MLX raises on Metal (mlx 0.32, backend/metal/allocator.cpp,
`device_info()["resource_limit"]`). Weights, passes and rows have the rest."""
SPARE_SHARE = 4
"""A continued conversation may get this fraction (1/n) of the free budget for later turns."""
COUNTED = "lookups prompt_tokens reused_tokens restored_tokens refused evicted_bytes".split()


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
        self.totals = Totals(max_buffers)
        self._roots: dict[CacheKey, Node] = {}
        self.sessions = Sessions()
        self._counted = Counter(dict.fromkeys(COUNTED, 0))
        self._warned: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Any thread may ask."""
        return self.totals.nbytes

    @property
    def in_use(self) -> int:
        """Bytes that rows use, which cannot be evicted. Any thread may ask."""
        return sum(row.stored for row in [*self.totals.rows] if row.in_use)

    def match(self, key: CacheKey, tokens: Sequence[int] | Ids, limit: int, grid: int = 1) -> Match:
        """The longest stored prefix of at most `limit` tokens. A row can resume at a multiple of
        `grid`, never inside a media span. `tokens` are key ids (`key_tokens`); an int64 array
        avoids the conversion. Changes nothing."""
        root = self._roots.get(key) or tree.new_root(self.totals)
        return tree.match(root, as_ids(tokens), limit, grid)

    def is_valid(self, match: Match) -> bool:
        return match.version == self.totals.version and not any(n.lost for n in match.nodes)

    def acquire(
        self,
        match: Match,
        make_cache: Callable[[], list[Any]],
        *,
        room: int = 0,
        reuse: Reuse | None = None,
        rows: int = 1,
        count_lookup: bool = True,
    ) -> tuple[list[Any], Lease | None]:
        """A fresh row cache with tokens `[0, match.length)`, and capacity for `room` more. Call it
        for the first of a prompt's `rows`, also for length 0. `reuse`: the row takes over, or
        shares, buffers of entries if it can; `None`: it copies. `count_lookup`: a client has asked
        for the prompt. Raises `ValueError` if the match is no longer valid, or `make_cache` makes
        another kind of cache than the stored one."""
        if not self.is_valid(match):
            raise ValueError("the prefix cache has changed since the match")
        cache, lease, in_place = make_cache(), None, 0
        if reuse is not None:
            spare = max(0, self.budget() - self.nbytes) // SPARE_SHARE
            lease, in_place = reuse.fill_in_place(match, rows, cache, room, spare)
        if match.length:
            state = match.path[-1].snapshot
            filler = RowFiller(cache, match.length, room, state.layers if state else (), in_place)
            filler.put_nodes(match.path, match.length)
            filler.finish(match.length, state)
        elif room:
            grow_by(cache, room)
        self.count_use(match, count_lookup=count_lookup)
        return cache, lease

    def insert(
        self,
        key: CacheKey,
        tokens: Sequence[int] | Ids,
        cache: list[Any],
        snapshots: Mapping[int, Snapshot],
        *,
        reply_at: int | None = None,
        session: Hashable = None,
        awaited: bool = False,
        ends_here: bool = True,
        lease: Lease | None = None,
    ) -> int:
        """Store a row, evicting others: as far as it fits, and a cache of an unknown kind not at
        all. Returns how many of its tokens are stored then. Raises `ValueError` if the cache holds
        fewer tokens than `tokens`, the key ids of all tokens in it.

        `lease`: the row's buffers, to which the entry can refer; `None`: it copies. `snapshots`: by
        token count. `reply_at`: tokens before the reply, if it is included. `awaited`: the next
        request of the session will come. `ends_here`: the cache holds no more tokens, which a cache
        with only states does not show."""
        ids, leaf = as_ids(tokens), None
        states = {n: state for n, state in snapshots.items() if 0 < n <= len(ids)}
        self.totals.remove_lost()
        try:
            kv, has_no_more = row_segment(cache, len(ids))
            at_end = ends_here and has_no_more
            if at_end and (last := take_snapshot(cache)) is not None:
                states[len(ids)] = last
            elif not (at_end or kv.complete):
                ids = ids[: max(states, default=0)]  # the states in the cache are later ones
            reply_at = len(ids) if reply_at is None else reply_at
            found = self.match(key, ids, len(ids))
            new = NewPath(ids, kv, states, reply_at, found.shared, len(ids))
            row = None if lease is None else lease.row_of(cache)
            leaf = self._add(key, new, found, row, session)
            if self.disk is not None:
                self.disk.save(key, ids, kv, states, reply_at=reply_at)
        except Unstorable as reason:
            self._warn(reason)
        if leaf is None:
            self._counted["refused"] += 1
            return 0
        prune(leaf)
        self.evict(keep=leaf.path())  # if there are too many buffers
        if session is not None:
            self.sessions.pin(session, leaf, len(ids) * new.token_bytes, awaited=awaited)
        return min(leaf.stop, len(ids))

    def _add(
        self, key: CacheKey, new: NewPath, found: Match, row: RowBuffers | None, session: Hashable
    ) -> Node | None:
        """Store a path as far as its session's share permits, evicting others for it. Returns the
        last stored node, if any. Raises `Unstorable` if it cannot be joined with stored ones."""
        root = self._roots.get(key) or tree.new_root(self.totals)
        first = next(iter(root.children.values()), None)
        if first is not None and segment_of(first).layout != new.kv.layout:
            raise Unstorable("a row with another KV shape or dtype than stored ones is not kept")
        stored = tree.split_path(found, new)
        budget = self.budget() if row is None else budget_after(row, new, self.budget)
        new = new if row is None else leave_in_place(row, new, stored)
        new, path = fit_path(new, stored, self.sessions.share(session, budget))
        added = new.added_bytes
        if self.nbytes > (limit := budget - added):
            others = self.sessions.split_at_shares(session, budget)
            self.evict(limit, keep={*path, *others})  # spare the shares of other sessions
            self.evict(limit, keep=path)  # unless their states make them too large
        if new.stop == 0:
            return None
        self._roots = {k: r for k, r in self._roots.items() if r.children} | {key: root}
        leaf = tree.add_nodes(path[-1] if path else root, new)
        self.totals.clock += added + 1
        for node in leaf.path():
            node.used = self.totals.clock
        return leaf

    def evict(self, limit: float = inf, *, keep: Collection[Node] = ()) -> int:
        """Shrink to `limit` bytes and `max_buffers` device buffers, as far as rows and `keep`
        permit. Returns the freed bytes."""
        self.totals.remove_lost()
        before = self.nbytes
        shrink(self._roots.values(), self.totals, self.sessions, limit, {*keep})
        freed = before - self.nbytes
        self._counted["evicted_bytes"] += freed
        return freed

    def release(self, lease: Lease, *, merged: bool = False) -> None:
        """A row ends or is merged: entries keep its buffers. After a failed pass, drop `lease`."""
        self.totals.release(lease, self.budget, merged=merged)

    def count_use(self, match: Match, restored: int = 0, *, count_lookup: bool = True) -> None:
        """A row uses the nodes of a match. `restored`: its tokens from disk, if that had more."""
        self.totals.clock += 1
        for node in match.path:
            node.used, node.hits = self.totals.clock, node.hits + 1
        if count_lookup:
            self._counted.update(lookups=1, prompt_tokens=match.total, restored_tokens=restored)
            self._counted["reused_tokens"] += restored or match.length

    def snapshot(self, cache: list[Any], at: int | None = None) -> Snapshot | None:
        """A copy of the states and windows, which cannot be cut out of a longer row later. `at`:
        their value after that many tokens (see `take_snapshot`). `None` if every layer can be cut
        at any token, or none is possible."""
        try:
            return take_snapshot(cache, at)
        except (Unstorable, ValueError) as reason:
            self._warn(reason)
            return None

    def save_prefill(self, key: CacheKey, ids: Ids, cache: list[Any], start: int) -> None:
        """Write the full files of a row to disk during its prefill, if the disk is fast enough. The
        last pass computed the tokens of `ids` from `start` on."""
        if self.disk is not None and self.disk.due(start, len(ids)):
            try:
                self.disk.save(key, ids, row_segment(cache, len(ids))[0], {})
            except Unstorable as reason:
                self._warn(reason)

    def storable_tokens(self, memory: MemoryProfile, session: Hashable) -> int:
        """Tokens of a row that fit the session's share, with the state at their end."""
        # the end of the prompt may have windows of its own, which take little
        states = memory.state_bytes + 2 * sum(size * nbytes for size, nbytes in memory.windows)
        nbytes = self.sessions.share(session, self.budget()) - states
        return max(0, nbytes // (memory.token_bytes + ID_BYTES))

    def clear(self) -> None:
        for node in [node for root in self._roots.values() for node in root.children.values()]:
            tree.remove(node)  # or the memory waits for the collector, as nodes form cycles
        self.sessions.clear()
        if self.disk is not None:
            self.disk.clear()

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
            "buffers": self.totals.buffers,
            "budget": self.budget(),
            **counted,
            "hit_rate": counted["reused_tokens"] / max(1, counted["prompt_tokens"]),
            "sessions": len(self.sessions),
            "disk": None if self.disk is None else self.disk.report(),
        }

    def stats(self) -> PrefixCacheStats:
        found = self.report()  # has more than the stats
        disk = found["disk"] or {"bytes": 0, "limit": 0}
        return PrefixCacheStats(**found, disk_bytes=disk["bytes"], disk_limit=disk["limit"])

    def nodes(self) -> Iterator[Node]:
        return chain.from_iterable(map(tree.nodes, self._roots.values()))

    def _warn(self, reason: Exception) -> None:
        if str(reason) not in self._warned:
            self._warned.add(str(reason))
            log.warning("prefix cache: %s", reason)
