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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...protocol.health import PrefixCacheFigures, PrefixNode
from ..memory import MemoryProfile
from ..row_cache import Kind, Unstorable, grow_by, strictest
from .buffers import Lease, Leases
from .disk import DiskTier, Restore
from .eviction import Sessions
from .segments import RowFiller, Snapshot, row_parts, take_snapshot
from .store import LivePath, Store
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


@dataclass
class Counters:
    lookups: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    refused: int = 0


class PrefixCache:
    """Engine thread only. `budget()`: bytes that the prefix cache may use now."""

    def __init__(
        self,
        *,
        budget: Callable[[], int],
        disk: DiskTier | None = None,
        max_buffers: int = MAX_BUFFERS,
    ) -> None:
        self.disk = disk
        self._budget = budget
        self._store = Store(max_buffers)
        self._sessions = Sessions()
        self._counters = Counters()
        self._warned: set[str] = set()

    @property
    def nbytes(self) -> int:
        return self._store.tally.nbytes

    @property
    def in_use(self) -> int:
        """Bytes that rows use, which cannot be evicted. Any thread may ask."""
        return self._store.in_use

    def match(self, key: CacheKey, tokens: Sequence[int] | Ids, limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens. It never ends inside a media span.
        `tokens` are key ids (`key_tokens`); an int64 array avoids the conversion. Read-only."""
        return self._store.match(key, as_ids(tokens), limit)

    def holds(self, match: Match) -> bool:
        return match.version == self._store.version

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
            spare = max(0, self._budget() - self.nbytes) // SPARE_SHARE
            lease, in_place = leases.begin(match, cache, room, spare)
        if match.length:
            state = match.snapshot
            filler = RowFiller(cache, match.length, room, state.layers if state else (), in_place)
            for node in match.path:
                stop = min(node.stop, match.length)
                filler.put(segment_of(node).arrays(), node.start, stop, 0)
            filler.finish(match.length, state)
        elif room:
            grow_by(cache, room)
        self.count(match)
        return cache, lease

    def leases(self, least: int | None) -> Leases:
        return Leases(self._store, self._budget, least)

    def on_disk(
        self, key: CacheKey, ids: Ids, make_cache: Callable[[], list[Any]], room: int, grid: int = 1
    ) -> Restore | None:
        """What a row of `room` tokens would get that memory has not. `None`: there is no disk
        tier."""
        if self.disk is None:
            return None
        return Restore(self.disk, self._store, key, ids, make_cache, room, grid)

    def save_head(self, key: CacheKey, ids: Ids, cache: list[Any], start: int) -> None:
        """Write a row to disk during its prefill, if the disk is fast enough. The last pass
        computed the tokens of `ids` from `start` on."""
        if self.disk is not None and self.disk.due(start, len(ids)):
            try:
                self.disk.save(key, ids, row_parts(cache, len(ids)), {})
            except Unstorable as reason:
                self._warn_once(str(reason))

    def fits(self, memory: MemoryProfile, session: str | None) -> int:
        """Tokens of such a row, with the state at their end, that fit the session's share."""
        windows = sum(window * each for window, each in memory.windows)
        # a window is stored twice: in the segments until it wraps, and in the state
        share, _ = self._sessions.share(session, self._budget())
        room = share - memory.state_bytes - 2 * windows
        return max(0, room // (memory.token_bytes + ID_BYTES))

    def count(self, match: Match, restored: int = 0) -> None:
        """Count a look-up. `restored`: tokens that came from disk, if it had more."""
        for node in self._store.touch(match.path[-1] if match.path else None):
            node.hits += 1
        if match.stateful is not None:
            match.stateful.resumed += 1
        if not match.counted:
            return
        self._counters.lookups += 1
        self._counters.prompt_tokens += match.asked
        self._counters.reused_tokens += restored or match.length
        self._counters.restored_tokens += restored

    def strictest(self, cache: list[Any]) -> Kind:
        """APPEND for a row that cannot be stored."""
        try:
            return strictest(cache)
        except Unstorable as reason:
            self._warn_once(str(reason))
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
            self._warn_once(str(reason))
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
        ends = {n: s for n, s in snapshots.items() if 0 < n <= len(ids) and not s.inside}
        inside = {n: s for n, s in snapshots.items() if n <= len(ids) and s.inside}
        shared = self._store.match(key, ids).shared if inside else 0
        own = None if lease is None else lease.own_of(cache)
        leaf, budget = None, 0
        try:
            row = row_parts(cache, len(ids))
            row = replace(row, exact=row.exact and not beyond)
            if not row.exact and not row.complete:  # its state belongs to a later token
                ids = ids[: max(ends, default=0)]
            before_reply = row.length if prompted is None else prompted
            path = LivePath(row, cache, ends, before_reply, inside, own)
            if own is not None:
                own.count(len(ids), row.stored(complete=False).token_bytes)
            budget = self._budget()  # what the cache counts is no longer the row's
            share = self._sessions.share(session, budget)
            leaf = self._store.add(key, ids, path, budget=budget, share=share)
            self._save(key, ids, path, shared)
        except Unstorable as reason:
            self._warn_once(str(reason))
        finally:
            if own is not None:
                self._store.recount()
        if leaf is None:
            self._counters.refused += 1
            return 0
        for at in sorted(inside, reverse=True):
            self._store.offer(leaf, at, inside[at], budget=budget, wanted=at <= shared)
        self._store.prune(leaf)
        if session is not None:
            each = row.stored(complete=row.complete).token_bytes + ID_BYTES
            self._sessions.pin(session, leaf, len(ids) * each, awaited=awaited)
        return min(leaf.stop, len(ids))

    def _save(self, key: CacheKey, ids: Ids, path: LivePath, shared: int) -> None:
        """Of the states inside messages, only those that rows wanted before are written."""
        if self.disk is not None:
            wanted = {at: state for at, state in path.spare.items() if at <= shared}
            states = {} if path.row.complete else {**path.states, **wanted}
            self.disk.save(key, ids, path.row, states, prompted=path.prompted)

    def evict(self, nbytes: int) -> int:
        """Shrink to this many bytes. Returns the freed bytes. What rows use stays."""
        return self._store.evict(nbytes=nbytes)

    def clear(self) -> None:
        self._store.clear()
        self._sessions.clear()
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        """Wait until the disk tier has written its queue."""
        if self.disk is not None:
            self.disk.close()

    def report(self) -> dict[str, Any]:
        every = list(self._store.nodes())
        counted = self._counters
        return {
            "entries": sum(not node.children for node in every),
            "nodes": len(every),
            "snapshots": sum(node.snapshot is not None for node in every),
            "tokens": sum(len(node.tokens) for node in every),
            "bytes": self.nbytes,
            "buffers": self._store.tally.buffers,
            "budget": self._budget(),
            **vars(counted),
            "evicted_bytes": self._store.evicted_bytes,
            "hit_rate": counted.reused_tokens / max(1, counted.prompt_tokens),
            "sessions": len(self._sessions),
            "disk": None if self.disk is None else self.disk.report(),
        }

    def figures(self) -> PrefixCacheFigures:
        found = self.report()
        disk = found["disk"] or {"bytes": 0, "limit": 0}
        known = PrefixCacheFigures.model_fields.keys() & found.keys()
        return PrefixCacheFigures(
            **{name: found[name] for name in known},
            disk_bytes=disk["bytes"],
            disk_limit=disk["limit"],
            tree=_outline(self._store.roots.values()),
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless bytes, references and pins are consistent."""
        self._store.check_integrity()
        if any(
            name not in self._sessions for node in self._store.nodes() for name in node.sessions
        ):
            raise AssertionError("a node is pinned by an unknown session")

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
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
