"""The prefix cache: stores the KV and states of prefixes for later requests.

    match = prefix_cache.match(key, ids, limit=len(ids) - 1)
    cache = prefix_cache.restore(match, model.make_cache)  # the first `match.length` tokens
    ... prefill the rest, at message ends: snapshots[n] = prefix_cache.snapshot(cache)
    prefix_cache.insert(key, ids_the_cache_holds, cache, snapshots)

Stored tokens never change: rows copy them, or append to the buffers of an entry (`resume`). A
`Match` is valid only while `holds` is true for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...isolation import Isolation
from ...protocol.health import PrefixCacheFigures
from ..memory import MemoryProfile
from ..row_cache import grow_by
from .buffers import Claim, Holding, RowBuffers, own_layers
from .disk import DiskTier
from .disk_lookup import DiskLookup
from .eviction import Sessions, Share
from .figures import Counters, figures, report
from .insertion import LivePath
from .layer_kinds import Kind, Unstorable, strictest
from .match import Match, Reuse, resume
from .restore import rebuild
from .segments import row_parts
from .snapshots import Snapshot, take_snapshot
from .store import Store
from .tree import ID_BYTES, CacheKey, Ids, Node, as_ids, key_tokens

__all__ = ["CacheKey", "Match", "PrefixCache", "key_tokens"]

log = logging.getLogger(__name__)

MAX_BUFFERS = 250_000
"""Half of the 499,000 at which MLX raises on Metal (mlx 0.32, backend/metal/allocator.cpp,
`device_info()["resource_limit"]`). Weights, passes and rows (two to six per layer) need the
rest."""
SPARE_SHARE = 4
"""A continued conversation may get this fraction (1/n) of the free budget for later turns."""


class PrefixCache:
    """Engine thread only. `budget()`: bytes that the prefix cache may use now."""

    def __init__(
        self,
        *,
        budget: Callable[[], int],
        disk: DiskTier | None = None,
        max_buffers: int = MAX_BUFFERS,
    ) -> None:
        self._budget = budget
        self._disk = disk
        self._store = Store(max_buffers)
        self._sessions = Sessions()
        self._counters = Counters()
        self._warned: set[str] = set()

    @property
    def nbytes(self) -> int:
        return self._store.tally.nbytes

    def match(self, key: CacheKey, tokens: Sequence[int] | Ids, limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens. It never ends inside a media span.
        `tokens` are key ids (`key_tokens`); an int64 array avoids the conversion. Read-only."""
        ids = as_ids(tokens)
        limit = max(0, min(limit, len(ids)))
        found = self._store.walk(key, ids[:limit])
        return resume(found, ids, self._store.version)

    def on_disk(
        self,
        key: CacheKey,
        ids: Ids,
        *,
        limit: int,
        make_cache: Callable[[], list[Any]],
        room: int,
        grid: int = 1,
    ) -> DiskLookup | None:
        """`None`: there is no disk tier."""
        if self._disk is None:
            return None
        return DiskLookup(
            self._disk, self._store, key, ids, limit=limit, grid=grid, make_cache=make_cache,
            room=room,
        )  # fmt: skip

    def save_head(self, key: CacheKey, ids: Ids, cache: list[Any], start: int) -> None:
        """Write a row to disk during its prefill, if the disk is fast enough. The last pass
        computed the tokens of `ids` from `start` on."""
        if self._disk is not None and self._disk.due(start, len(ids)):
            try:
                self._disk.save(key, ids, row_parts(cache, len(ids)), {})
            except Unstorable as reason:
                self._warn_once(str(reason))

    @property
    def on_disk_too(self) -> bool:
        return self._disk is not None

    def fits(self, memory: MemoryProfile, session: str | None) -> int:
        """Tokens of such a row, with the state at their end, that fit the session's share."""
        windows = sum(window * each for window, each in memory.windows)
        # a window is stored twice: in the segments until it wraps, and in the state
        share = self._sessions.share(session, self._budget())
        room = share.nbytes - memory.state_bytes - 2 * windows
        return max(0, room // (memory.token_bytes + ID_BYTES))

    def holds(self, match: Match) -> bool:
        return match.version == self._store.version

    def restore(
        self, match: Match, make_cache: Callable[[], list[Any]], *, room: int = 0
    ) -> list[Any]:
        """A fresh row cache with copies of the first `match.length` tokens, and capacity for `room`
        more.

        Call it once per row, also for length 0: it counts the look-up. Raises `ValueError` if the
        match is no longer valid, or `make_cache` makes another kind of cache than the stored one.
        """
        if not self.holds(match):
            raise ValueError("the prefix cache has changed since the match")
        cache = make_cache()
        self._fill(cache, match, room, {})
        self.used(match)
        return cache

    def prepare(self, match: Match, *, least: int | None) -> bool:
        """Split the entry where a row leaves it. Returns whether the match must be found again.
        `least`: fewest tokens to share with other rows; `None`: none."""
        return Reuse(self._store, least).prepare(match)

    def claim(self, match: Match, *, least: int | None) -> Claim | None:
        return Reuse(self._store, least).claim(match) if self.holds(match) else None

    def resume(
        self,
        match: Match,
        make_cache: Callable[[], list[Any]],
        *,
        room: int = 0,
        least: int | None = None,
    ) -> tuple[list[Any], Holding]:
        """Like `restore`, but the row uses the buffers of the entry, if no other row does."""
        if not self.holds(match):
            raise ValueError("the prefix cache has changed since the match")
        cache = make_cache()
        spare = max(0, self._budget() - self.nbytes) // SPARE_SHARE
        holding, in_place = Reuse(self._store, least).begin(match, cache, room, spare)
        self._fill(cache, match, room, in_place)
        self.used(match)
        return cache, holding

    def fork(
        self, holding: Holding, cache: list[Any], *, least: int | None
    ) -> tuple[list[Any], Holding | None]:
        return Reuse(self._store, least).fork(holding, cache)

    def hold(self, cache: list[Any]) -> Holding:
        own = RowBuffers(own_layers(cache))
        self._store.know(own)
        return Holding(own)

    def trim(self, own: RowBuffers, tokens: int) -> None:
        with Isolation() as tried:  # a pass of the row may have failed
            if own.holding is not None:
                own.holding.trim(tokens)
        if tried.fault is not None:
            log.warning("a row keeps its capacity: %s", tried.fault.summary)

    def give_back(self, holding: Holding) -> None:
        """A row has ended, or was merged with others, and none of its passes has failed."""
        own = holding.give_back()
        if own is not None and own.stored:
            self._store.park(own, self._budget())

    def united(self, holding: Holding) -> None:
        """A row has copied the prefix in front of its own tokens, as the last that held it."""
        base, own = holding.base, holding.own
        holding.base = None
        if base is not None and own is not None:
            self._store.move(base, own)

    @property
    def in_use(self) -> int:
        return self._store.in_use

    def _fill(self, cache: list[Any], match: Match, room: int, in_place: Mapping[int, int]) -> None:
        if match.length:
            rebuild(
                cache, match.segments, match.snapshot, length=match.length, room=room,
                in_place=in_place,
            )  # fmt: skip
        elif room:
            grow_by(cache, room)

    def used(self, match: Match, restored: int = 0) -> None:
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
        holding: Holding | None = None,
    ) -> int:
        """Store a row, evicting others. Returns how many of its tokens are stored then.

        `tokens`: all tokens in the cache, as key ids. `holding`: the row's buffers, to which the
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
        shared = self._store.walk(key, ids).shared if inside else 0
        own = None if holding is None else holding.own_of(cache)
        try:
            row = row_parts(cache, len(ids))
            row = replace(row, exact=row.exact and not beyond)
            if not row.exact and not row.complete:  # its state belongs to a later token
                ids = ids[: max(ends, default=0)]
            before_reply = row.length if prompted is None else prompted
            path = LivePath(row, cache, ends, before_reply, inside, own)
            if own is not None:
                own.count(len(ids), row.token_bytes(complete=False))
            budget = self._budget()
            leaf = self._add(key, ids, path, budget, self._sessions.share(session, budget))
            self._save(key, ids, path, shared)
        except Unstorable as reason:
            self._warn_once(str(reason))
            leaf, budget = None, 0
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
            each = path.row.token_bytes(complete=path.complete) + ID_BYTES
            self._sessions.pin(session, leaf, len(ids) * each, awaited=awaited)
        return min(leaf.stop, len(ids))

    def evict_to(self, nbytes: int) -> int:
        return self._store.evict(nbytes=nbytes)

    def clear(self) -> None:
        self._store.clear()
        self._sessions.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Wait until the disk tier has written its queue."""
        if self._disk is not None:
            self._disk.close()

    def report(self) -> dict[str, Any]:
        return {
            **report(self._store, self._counters, self._budget()),
            "sessions": len(self._sessions),
            "disk": None if self._disk is None else self._disk.report(),
        }

    def figures(self) -> PrefixCacheFigures:
        found = figures(self._store, self._counters, self._budget())
        if self._disk is None:
            return found
        report = self._disk.report()
        return found.model_copy(
            update={"disk_bytes": report["bytes"], "disk_limit": report["limit"]}
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless bytes, references and pins are consistent."""
        self._store.check_integrity()
        if any(
            name not in self._sessions for node in self._store.nodes() for name in node.sessions
        ):
            raise AssertionError("a node is pinned by an unknown session")

    def _add(
        self, key: CacheKey, ids: Ids, path: LivePath, budget: int, share: Share
    ) -> Node | None:
        layout = path.row.layout
        if len(ids) and not self._store.fits_layout(key, layout):
            self._warn_once("a row with another KV shape or dtype than the stored ones is not kept")
            return None
        return self._store.add(key, ids, path, budget=budget, share=share, layout=layout)

    def _save(self, key: CacheKey, ids: Ids, path: LivePath, shared: int) -> None:
        """Of the states inside messages, only those that rows wanted before are written."""
        if self._disk is not None:
            wanted = {at: state for at, state in path.spare.items() if at <= shared}
            states = {} if path.complete else {**path.states, **wanted}
            self._disk.save(key, ids, path.row, states, prompted=path.prompted)

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("prefix cache: %s", reason)
