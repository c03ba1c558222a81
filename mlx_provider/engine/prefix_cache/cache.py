"""The prefix cache: what was computed once for a prefix is not computed again.

    match = prefix_cache.match(key, ids, limit=len(ids) - 1)
    cache = prefix_cache.restore(match, model.make_cache)  # holds the first `match.length` tokens
    ... prefill the rest, at message ends: snapshots[n] = prefix_cache.snapshot(cache)
    prefix_cache.insert(key, ids_the_cache_holds, cache, snapshots)

Stored arrays never change: a row works on copies, and later events split, extend and drop nodes
of the tree but never a payload. Who holds what: the tree owns its payloads; a `Match` names nodes,
which lose theirs when they are evicted, and counts only while the prefix cache `holds` it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

from ...protocol.figures import PrefixCacheFigures
from ..agreement import ALONE, Agreement
from ..row_cache import grow_by
from .charges import Among, parts_over, snapshot_over
from .disk import DiskTier
from .eviction import evict, value
from .insertion import LivePath, LoadedPath, Source, attach, grow, grows_complete, prune
from .key import CacheKey, Ids, as_ids, key_tokens, outside_spans
from .outline import outline
from .segments import Kind, Segment, rebuild, strictest, take_snapshot
from .snapshots import Snapshot, Unstorable
from .tree import Node, Walk, check, new_root, nodes, walk

__all__ = ["CacheKey", "Match", "PrefixCache", "key_tokens"]

log = logging.getLogger(__name__)

Layout = tuple[Any, ...]

MAX_BUFFERS = 250_000
"""Device buffers that the prefix cache may hold: half of the 499,000 at which MLX raises on Metal
(mlx 0.32, backend/metal/allocator.cpp, `device_info()["resource_limit"]`). The other half is for
weights, passes, and rows, which hold two to six per layer."""
MAX_SESSIONS = 256
"""Sessions whose newest path is pinned; the one longest unused loses its pin first."""


@dataclass(frozen=True)
class Match:
    """The longest prefix a row can resume from, and why it is not longer."""

    length: int
    """Tokens that `restore` will put into the row's cache."""
    asked: int
    """Tokens of the whole prompt."""
    shared: int
    """Tokens in common with the closest stored path; more than `length` where state is missing."""
    branch: int
    """Those after which this prompt leaves another one; 0 where it does not."""
    diverged_at: int | None
    """First position that differs from that path; `None`: the path ended, or nothing differs."""
    stored_token: int | None
    """The id stored at `diverged_at`."""
    path: tuple[Node, ...] = ()
    """The nodes used, from the first token on."""
    stateful: Node | None = None
    """The one whose snapshot is used, where that takes one."""
    state: object = None
    """Of the prefix cache, when this was found."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(cast("Segment", node.segment) for node in self.path)

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.stateful is None else cast("Snapshot", self.stateful.snapshot)


@dataclass
class Counters:
    """What happened since the start."""

    lookups: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    refused: int = 0
    evicted_bytes: int = 0


class PrefixCache:
    """All methods on the engine thread. `budget()`: bytes the prefix cache may hold right now."""

    def __init__(
        self,
        *,
        budget: Callable[[], int],
        disk: DiskTier | None = None,
        max_buffers: int = MAX_BUFFERS,
        agreed: Agreement = ALONE,
    ) -> None:
        """`agreed`: with other ranks, whose nodes come and go alike and count for as many bytes."""
        self._budget = budget
        self._max_buffers = max_buffers
        self._agreed = agreed
        self._disk = disk
        self._roots: dict[CacheKey, Node] = {}
        self._layouts: dict[CacheKey, Layout] = {}
        self._sessions: OrderedDict[str, Node] = OrderedDict()
        self._bytes = 0
        self._buffers = 0
        self._clock = 0
        self._state = object()
        """Another one whenever another match might be found."""
        self._told: set[str] = set()
        self._counters = Counters()

    @property
    def nbytes(self) -> int:
        """Bytes of the prefix cache's own arrays (device arrays and token ids)."""
        return self._bytes

    def match(self, key: CacheKey, tokens: Sequence[int] | Ids, limit: int) -> Match:
        """Longest usable prefix of at most `limit` tokens; never ends inside a media span.

        `tokens` are key ids (`key_tokens`); an int64 array spares the conversion. Does not
        change what is stored, except that entries of the disk tier come into memory.
        """
        ids = as_ids(tokens)
        limit = max(0, min(limit, len(ids)))
        found = self._walk(key, ids[:limit])
        best = _resume(found, ids)
        if best[0] < limit and self._load(key, ids, limit, found, best[0]):
            found = self._walk(key, ids[:limit])
            best = _resume(found, ids)
        return _match(found, len(ids), *best, state=self._state)

    def holds(self, match: Match) -> bool:
        """Whether nothing was stored or evicted since `match` was found."""
        return match.state is self._state

    def restore(
        self, match: Match, make_cache: Callable[[], list[Any]], *, room: int = 0
    ) -> list[Any]:
        """A fresh row cache holding `match.length` tokens; `room`: tokens soon to be appended.

        Call it once for every row, also for a match of length 0: it is what counts as a lookup.
        Raises `ValueError` if the match no longer counts, or `make_cache` makes another kind of
        cache than was stored.
        """
        if not self.holds(match):
            raise ValueError("the prefix cache has changed since the match")
        cache = make_cache()
        if match.length:
            rebuild(cache, match.segments, match.snapshot, length=match.length, room=room)
        elif room:
            grow_by(cache, room)
        for node in self._touch(match.path[-1] if match.path else None):
            node.hits += 1
        if match.stateful is not None:
            match.stateful.resumed += 1
        self._counters.lookups += 1
        self._counters.prompt_tokens += match.asked
        self._counters.reused_tokens += match.length
        return cache

    def strictest(self, cache: list[Any]) -> Kind:
        """What the layers of a row cache allow at most; APPEND too where it cannot be stored."""
        try:
            return strictest(cache)
        except Unstorable as reason:
            self._tell(str(reason))
            return Kind.APPEND

    def snapshot(
        self,
        cache: list[Any],
        at: int | None = None,
        *,
        inside: bool = False,
        among: Among | None = None,
    ) -> Snapshot | None:
        """A copy of what cannot be cut out of a longer row later: states, and windows.

        `at`: as they were after that many tokens (`take_snapshot` says when that can be had);
        `inside`: that is not at the end of a message, so it is the first to go; `among`: ranks that
        keep unlike parts of the row, all of which take theirs.
        `None` where every layer can be cut at any time, or where there is nothing to be had.
        """
        found, failed = None, False
        try:
            found = take_snapshot(cache, at)
        except (Unstorable, ValueError) as reason:
            self._tell(str(reason))
            failed = True
        if among is not None:
            found = snapshot_over(found, among, failed=failed)
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
        beyond: bool = False,
        among: Among | None = None,
    ) -> None:
        """Keep a row: `tokens` are all that the cache holds, as key ids. The cache stays as it is.

        `snapshots` by token count, those inside messages only where nothing better has to go for
        them; `prompted`: tokens before the reply, if that is among them. A cache of append-only
        layers may hold more tokens. Makes room first; an entry larger than the budget, or of an
        unknown make, is not stored. Raises `ValueError` if the cache holds fewer tokens.
        `beyond`: it holds more, which a cache of states alone does not show; `among`: ranks that
        keep unlike parts of the row, all of which insert theirs.
        """
        ids = as_ids(tokens)
        ends = {n: s for n, s in snapshots.items() if 0 < n <= len(ids) and not s.inside}
        inside = {n: s for n, s in snapshots.items() if n <= len(ids) and s.inside}
        before = len(ids) if prompted is None else prompted
        shared = self._walk(key, ids).shared if inside else 0
        try:
            row = parts_over(cache, len(ids), beyond=beyond, among=among)
            if among is not None and row.exact and among.kind is not Kind.APPEND:
                last = self.snapshot(cache, among=among)
                ends |= {} if last is None else {len(ids): last}
                row = replace(row, exact=False)  # its state is taken
            if not row.exact and not row.complete:  # its state is of a later token
                ids = ids[: max(ends, default=0)]
            leaf = self._grow(key, ids, LivePath(row, cache, ends, before), layout=row.layout)
        except Unstorable as reason:
            self._tell(str(reason))
            leaf = None
        if leaf is None:
            self._counters.refused += 1
            return
        self._state = object()
        for at in sorted(inside, reverse=True):
            self._offer(leaf, at, inside[at], wanted=at <= shared)
        self._buffers -= _buffers(leaf.path())
        gone = prune(leaf)
        self._buffers += _buffers(leaf.path())
        self._bytes -= sum(size for _, size in gone)
        if session is not None:
            self._pin(session, leaf)
        if self._disk is not None:
            self._disk.save(key, leaf.path(), [at for at, _ in gone])

    def evict_to(self, bytes_: int) -> int:
        """Shrink to at most `bytes_`; the bytes freed."""
        self._agreed.tell("evict", lambda: {"to": bytes_})
        return self._evict(self._bytes - bytes_, frozenset())

    def clear(self) -> None:
        """Forget everything, also on disk."""
        self._agreed.tell("clear", dict)
        self._roots.clear()
        self._layouts.clear()
        self._sessions.clear()
        self._state = object()
        self._bytes = self._buffers = 0
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Write what is queued for the disk tier and end its thread."""
        if self._disk is not None:
            self._disk.close()

    def report(self) -> dict[str, Any]:
        """Sizes and counters, JSON-able."""
        everything = [node for root in self._roots.values() for node in nodes(root)]
        counters = self._counters
        return {
            "entries": sum(not node.children for node in everything),
            "nodes": len(everything),
            "snapshots": sum(node.snapshot is not None for node in everything),
            "tokens": sum(len(node.tokens) for node in everything),
            "bytes": self._bytes,
            "buffers": self._buffers,
            "budget": self._budget(),
            "sessions": len(self._sessions),
            **vars(counters),
            "hit_rate": counters.reused_tokens / max(1, counters.prompt_tokens),
            "disk": None if self._disk is None else self._disk.report(),
        }

    def figures(self) -> PrefixCacheFigures:
        """The same for who watches, with the tree but none of its tokens."""
        counters = self._counters
        sizes = [len(node.children) for root in self._roots.values() for node in nodes(root)]
        return PrefixCacheFigures(
            entries=sizes.count(0),
            nodes=len(sizes),
            bytes=self._bytes,
            budget=self._budget(),
            lookups=counters.lookups,
            prompt_tokens=counters.prompt_tokens,
            reused_tokens=counters.reused_tokens,
            evicted_bytes=counters.evicted_bytes,
            hit_rate=counters.reused_tokens / max(1, counters.prompt_tokens),
            tree=outline(self._roots.values()),
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless bytes, references and pins are what they should be."""
        total = sum(check(root) for root in self._roots.values())
        if total != self._bytes:
            raise AssertionError(f"counts {self._bytes} bytes, holds {total}")
        buffers = sum(_buffers(nodes(root)) for root in self._roots.values())
        if buffers != self._buffers:
            raise AssertionError(f"counts {self._buffers} buffers, holds {buffers}")
        if any(not root.children for root in self._roots.values()):
            raise AssertionError("an empty tree is kept")
        pinned = {s for root in self._roots.values() for n in nodes(root) for s in n.sessions}
        if not pinned <= self._sessions.keys():
            raise AssertionError("a node is pinned by an unknown session")

    def _grow(
        self, key: CacheKey, ids: Ids, source: Source, *, layout: Layout | None = None
    ) -> Node | None:
        """Put a path into the tree; its last node, or `None` if it cannot be kept."""
        if len(ids) == 0 or not self._fits_layout(key, layout):
            return None
        root = self._roots.get(key) or new_root()
        found = walk(root, ids, len(ids))
        path = [node for node, _ in found.steps]
        complete = grows_complete(found, source)
        need = source.bytes_beyond(found.shared, len(ids), complete=complete)
        need += ids[found.shared :].nbytes
        budget = self._agreed_budget()
        if sum(map(_bytes_to_stay, path)) + need > budget:
            return None
        self._evict(self._bytes + need - budget, frozenset(path))
        self._state = object()
        self._roots[key] = root
        if layout is not None:
            self._layouts[key] = layout
        before = _buffers(path)
        leaf, added = grow(root, found, ids, source)
        self._bytes += added
        # where the path leaves a node, the lower part of that is beside it
        self._buffers += _buffers({*path, *leaf.path()}) - before
        self._clock += added
        self._touch(leaf)
        self._evict(0, frozenset(leaf.path()), buffers=self._buffers - self._max_buffers)
        return leaf

    def _agreed_budget(self) -> int:
        return self._agreed.on("prefix budget", self._budget, int, int)

    def _walk(self, key: CacheKey, ids: Ids) -> Walk:
        return walk(self._roots.get(key) or new_root(), ids, len(ids))

    def _offer(self, leaf: Node, at: int, state: Snapshot, *, wanted: bool) -> None:
        """Keep a state inside a message, unless all that could go for it is worth more."""
        before = _buffers(leaf.path())
        node = attach(leaf, at, state, wanted=wanted)
        if node is None:
            return
        self._buffers += _buffers(leaf.path()) - before
        self._bytes += state.nbytes
        self._clock += state.nbytes
        worth = value(node, self._clock, self._bytes)
        budget = self._agreed_budget()
        self._evict(self._bytes - budget, frozenset(leaf.path()), below=worth)
        if self._bytes > budget:
            node.snapshot = None
            self._bytes -= state.nbytes
            self._buffers -= state.buffers

    def _fits_layout(self, key: CacheKey, layout: Layout | None) -> bool:
        if layout is None or self._layouts.get(key, layout) == layout:
            return True
        self._tell("a row whose KV has another shape or dtype than the stored ones is not kept")
        return False

    def _touch(self, leaf: Node | None) -> list[Node]:
        self._clock += 1
        path = [] if leaf is None else leaf.path()
        for node in path:
            node.used = self._clock
        return path

    def _evict(
        self, need: int, keep: frozenset[Node], *, buffers: int = 0, below: float = inf
    ) -> int:
        if need <= 0 and buffers <= 0:
            return 0
        freed, dropped = evict(
            self._roots.values(), need, clock=self._clock, held=self._bytes, keep=keep,
            buffers=buffers, below=below,
        )  # fmt: skip
        self._bytes -= freed
        self._buffers -= dropped
        self._state = object()
        self._counters.evicted_bytes += freed
        self._roots = {key: root for key, root in self._roots.items() if root.children}
        self._layouts = {key: shape for key, shape in self._layouts.items() if key in self._roots}
        return freed

    def _pin(self, session: str, leaf: Node) -> None:
        self._unpin(session)
        self._sessions[session] = leaf
        for node in leaf.path():
            node.sessions.add(session)
        while len(self._sessions) > MAX_SESSIONS:
            self._unpin(next(iter(self._sessions)))

    def _unpin(self, session: str) -> None:
        leaf = self._sessions.pop(session, None)
        for node in leaf.path() if leaf is not None else ():
            node.sessions.discard(session)

    def _load(self, key: CacheKey, ids: Ids, limit: int, found: Walk, have: int) -> bool:
        """Bring a prefix of more than `have` tokens in from disk, where there is one."""
        if self._disk is None:
            return False
        complete = all(node.complete for node, _ in found.steps)
        budget = self._budget()
        loaded = self._disk.load(
            key, ids[:limit], found.shared, have, complete=complete, budget=budget
        )
        if loaded is None:
            return False
        path = LoadedPath(loaded.parts, loaded.complete, loaded.states)
        return self._grow(key, ids[: loaded.length], path) is not None

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("prefix cache: %s", reason)


def _buffers(of: Iterable[Node]) -> int:
    return sum(node.buffers for node in of)


def _bytes_to_stay(node: Node) -> int:
    """Bytes of a node that is in use: without its snapshot where that is a guess."""
    return node.nbytes - (node.snapshot.nbytes if node.snapshot and node.guessed else 0)


def _resume(found: Walk, ids: Ids) -> tuple[int, Node | None]:
    """How many tokens a row can resume with, and the node whose snapshot that takes."""
    usable = outside_spans(ids, found.shared)
    length, chosen = 0, None
    for node, agreed in found.steps:
        if node.complete:
            length, chosen = min(usable, node.start + agreed), None
        elif (
            node.snapshot is not None
            and agreed == len(node.tokens)
            and node.stop == outside_spans(ids, node.stop) <= usable
        ):
            length, chosen = node.stop, node
    return length, chosen


def _match(found: Walk, asked: int, length: int, stateful: Node | None, state: object) -> Match:
    used = tuple(node for node, _ in found.steps if node.start < length)
    return Match(
        length,
        asked,
        found.shared,
        found.branch,
        found.diverged_at,
        found.stored_token,
        used,
        stateful,
        state,
    )
