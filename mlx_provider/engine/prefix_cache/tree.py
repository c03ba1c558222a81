"""A radix tree of token ids, with content hashes for images. Imports no mlx."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ...records import Prompt

if TYPE_CHECKING:
    from .buffers import RowBuffers
    from .segments import Segment, Snapshot

Ids = NDArray[np.int64]
ID_BYTES = 8
MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""
DOUBLED_SHARE = 4
"""Tokens of a row that nodes of others store, too, are at most this fraction (1/n) of it."""


@dataclass(frozen=True)
class CacheKey:
    """What determines the KV besides the tokens. Entries of different keys never match."""

    fingerprint: str
    """`ModelInfo.fingerprint`: weights, adapter, quantisation, sliding window."""
    kv: str = ""
    """The kind of the KV cache (its quantisation), and the code that computes it."""
    salt: str = ""
    """Tenant. Entries of one salt are invisible to all others."""

    def digest(self) -> bytes:
        """16 bytes. The salt cannot be recovered from it."""
        text = "\0".join((self.fingerprint, self.kv, self.salt))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def key_tokens(prompt: Prompt) -> list[int]:
    """The prompt's token ids, with negative ids in place of each media span. They derive from the
    item's content hash and the span's length, so another item ends a match at its first token. The
    first id of a span is even, all others are odd."""
    ids = list(prompt.tokens)
    for span in prompt.spans:
        length = span.end - span.start
        seed = hashlib.sha256(f"{span.content_hash}\0{length}".encode()).digest()
        first = -2 * (1 + (int.from_bytes(seed[:8], "little") >> 3))
        ids[span.start : span.end] = [first, *([first - 1] * (length - 1))][:length]
    return ids


def as_ids(tokens: Sequence[int] | Ids) -> Ids:
    """An int64 array is returned without a copy."""
    return np.asarray(tokens, dtype=np.int64)


def outside_spans(ids: Ids, at: int, grid: int = 1) -> int:
    """The largest multiple of `grid` <= `at` that is not inside a media span."""
    at -= at % grid
    if at >= len(ids) or ids[at] >= 0 or ids[at] % 2 == 0:
        return at
    before = ids[:at]
    starts = np.flatnonzero((before < 0) & (before % 2 == 0))
    return outside_spans(ids, int(starts[-1]), grid) if len(starts) else 0


@dataclass(eq=False)
class Totals:
    """What all nodes of a prefix cache hold. Any thread may read the numbers."""

    nbytes: int = 0
    buffers: int = 0
    """Device buffers."""
    version: int = 0
    """Number of changes. Each outdates all matches."""
    rows: dict[RowBuffers, int] = field(default_factory=dict)
    """Buffers of rows to which nodes refer, each with the bytes of its unused capacity that count:
    none while a row uses it."""

    def set_spare(self, row: RowBuffers, nbytes: int) -> None:
        if row in self.rows:
            self.nbytes += nbytes - self.rows[row]
            self.rows[row] = nbytes


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, stop)` of every path through it. Its parent ends where it starts."""

    tokens: Ids
    start: int
    parent: Node | None
    totals: Totals
    segment: Segment | None = None
    snapshot: Snapshot | None = None
    """State at `stop`, if not every layer can be cut."""
    children: dict[int, Node] = field(default_factory=dict)
    """By their first tokens."""
    used: int = 0
    """Time of its last use, on the cache's clock: bytes stored until then, plus uses."""
    hits: int = 0
    """Number of rows restored through it. Starts at 1 if more than half of its path was stored."""
    generated: bool = False
    """Its tokens are from a reply: a prompt that differs here has tokenized the reply otherwise."""

    def set_payload(self, segment: Segment | None, snapshot: Snapshot | None) -> None:
        """Replace KV and state. Besides `Totals.set_spare`, only this changes the totals."""
        totals, old, nbytes, buffers = self.totals, self.row, self.nbytes, self.buffers
        totals.version += 1
        if old is not None:
            old.stored -= segment_of(self).kv_bytes
        self.segment, self.snapshot = segment, snapshot
        totals.nbytes += self.nbytes - nbytes
        totals.buffers += self.buffers - buffers
        if self.row is not None:
            self.row.stored += segment_of(self).kv_bytes
            self.row.nodes.add(self)
            totals.rows.setdefault(self.row, 0)
        if old is not None and old is not self.row:
            old.nodes.discard(self)
            if not old.nodes:
                totals.nbytes -= totals.rows.pop(old)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether a path may resume at any of its tokens: the same for all nodes of a tree."""
        return self.segment is not None and self.segment.complete

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.segment, self.snapshot) if part is not None)

    @property
    def buffers(self) -> int:
        return sum(part.buffers for part in (self.segment, self.snapshot) if part is not None)

    @property
    def row(self) -> RowBuffers | None:
        """The buffers of a row in which its tokens are."""
        return None if self.segment is None else self.segment.row

    @property
    def needed(self) -> bool:
        """Whether its buffers are in use, so that its eviction frees nothing."""
        return self.row is not None and self.row.needed

    @property
    def lost(self) -> bool:
        """Whether the row in whose buffers it is has failed."""
        return self.row is not None and self.row.lost

    def path(self) -> list[Node]:
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


def segment_of(node: Node) -> Segment:
    """Of any node but a root."""
    return cast("Segment", node.segment)


@dataclass(frozen=True)
class Match:
    """The stored path that is closest to a prompt: tokens `[0, shared)` match. A row can resume
    with `[0, length)`: fewer if a state is missing."""

    nodes: Sequence[Node]
    """Of the path. The last one may continue behind `shared`."""
    shared: int
    length: int = 0
    total: int = 0
    """Tokens of the prompt."""
    diverged_at: int | None = None
    """First position that differs from the path, if any."""
    branch: int = 0
    """`diverged_at`, if a stored prompt continues there. 0 if at most stored replies do."""
    version: int = 0

    @property
    def path(self) -> list[Node]:
        """The nodes of tokens `[0, length)`, also once some were split. If not every layer can be
        cut, the row resumes with the snapshot of the last one."""
        every = self.nodes[-1].path() if self.nodes else []
        return [node for node in every if node.start < self.length]


def new_root(totals: Totals) -> Node:
    return Node(np.empty(0, np.int64), 0, None, totals)


def match(root: Node, ids: Ids, limit: int, grid: int = 1) -> Match:
    """See `PrefixCache.match`."""
    nodes, node, at = list[Node](), root, 0
    while at < limit and at == node.stop:
        child = node.children.get(int(ids[at]))
        if child is None or child.lost:
            break
        at += common(child.tokens, ids[at:limit])
        nodes.append(node := child)
    following = [node] if at < node.stop else node.children.values()
    others = [each for each in following if not each.lost] if at < limit else []
    branch = at if any(not each.generated for each in others) else 0
    length, differs = _resumable(nodes, at, ids, grid), at if others else None
    return Match(nodes, at, length, len(ids), differs, branch, root.totals.version)


def _resumable(path: Sequence[Node], shared: int, ids: Ids, grid: int) -> int:
    """Where a row can resume, never inside a media span."""
    length = 0
    for node in path:
        at = outside_spans(ids, min(node.stop, shared), grid)
        if node.complete or (node.snapshot is not None and at == node.stop):
            length = at
    return length


def common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def split(node: Node, at: int) -> Node:
    """Split a node, which is no root, after `at` of its tokens. Returns the new upper part; `node`
    remains the lower part, with snapshot and children."""
    segment, parent = segment_of(node), cast("Node", node.parent)
    upper = Node(
        node.tokens[:at].copy(), node.start, parent, node.totals, used=node.used, hits=node.hits,
        generated=node.generated,
    )  # fmt: skip
    first, rest = segment.slice(0, at), segment.slice(at, len(node.tokens))
    upper.set_payload(first, None)
    parent.children[int(node.tokens[0])] = upper
    node.set_payload(rest, node.snapshot)
    node.tokens = node.tokens[at:].copy()
    node.start += at
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    return upper


@dataclass(frozen=True)
class NewPath:
    """A row to store, first all of it, then as much as fits."""

    ids: Ids
    kv: Segment
    """Of the whole row."""
    states: Mapping[int, Snapshot]
    """By token count."""
    reply_at: int
    """Tokens before the reply."""
    row: RowBuffers | None
    """The row's buffers, if nodes can refer to them."""
    shared: int
    """Tokens that were stored before."""
    stop: int
    """Tokens that are stored then."""
    refers_from: int = 0
    """Nodes refer to `row` from this token on. Nodes of others store those before."""

    @property
    def token_bytes(self) -> int:
        return self.kv.token_bytes + ID_BYTES

    @property
    def doubled_bytes(self) -> int:
        """Of the row's tokens before `refers_from` (`Segment.doubled_tokens`), unless its nodes
        count them already."""
        row = self.row
        doubled = 0 if row is None or row.nodes else self.refers_from - row.base_tokens
        return doubled * self.kv.token_bytes

    def segment(self, start: int, stop: int) -> Segment:
        """Tokens `[start, stop)`, copied unless they stay in the row's buffers."""
        if self.row is None or start < self.refers_from:
            return self.kv.slice(start, stop)
        doubled = self.refers_from - self.row.base_tokens if start == self.refers_from else 0
        part = replace(self.kv, length=stop - start, arrays={}, start=start)
        return replace(part, row=self.row, doubled_tokens=doubled)


def refer(new: NewPath, path: Sequence[Node]) -> NewPath:
    """Decide whether nodes of a path refer to the row's buffers, and from which token on. Those
    before it count twice, so they must be few. `path`: its stored nodes."""
    row = new.row
    if row is None:
        return new
    # without a common prefix, both are `None`; with one that no node has, only `last` is
    last = next((node.row for node in path if node.stop == row.base_tokens), None)

    def refers(node: Node) -> bool:  # already, or in place of a copy
        return node.row in (None, row) and segment_of(node).layers == new.kv.layers

    others = [node.stop for node in path if node.start >= row.base_tokens and not refers(node)]
    start = max(others, default=row.base_tokens)
    is_possible = (
        last is row.base
        and DOUBLED_SHARE * (start - row.base_tokens) <= len(new.ids) - row.base_tokens
        and all(node.start >= start for node in row.nodes)  # no node of others is between them
        and all(node.stop <= len(new.ids) for node in path)  # else the row lacks the rest of one
    )
    return replace(new, row=row if is_possible else None, refers_from=start)


def split_path(found: Match, new: NewPath) -> list[Node]:
    """The stored nodes of the path. The last node is split where the path leaves it, but not where
    the path ends in it and needs no state there: then there is nothing to add."""
    path, is_stored = [*found.nodes], new.kv.complete and new.shared == len(new.ids)
    if path and found.shared < path[-1].stop and not is_stored:
        path[-1] = split(path[-1], found.shared - path[-1].start)
    return path


def cut_back(path: Sequence[Node], stop: int, length: int, states_at: Set[int]) -> list[Node]:
    """The nodes of `path`, the stored part of one with `length` tokens, up to `stop`. They keep the
    snapshots at `states_at`."""
    nodes = [node for node in path if node.start < stop]
    if nodes and stop < nodes[-1].stop and stop < length:
        nodes[-1] = split(nodes[-1], stop - nodes[-1].start)
    for node in nodes:
        if node.snapshot is not None and node.stop not in states_at:
            node.set_payload(node.segment, None)
    return nodes


def add_nodes(parent: Node, new: NewPath) -> Node:
    """Let the nodes up to `parent` refer to the row, add tokens `[parent.stop, new.stop)` below it,
    and the states. Returns the last node."""
    for node in parent.path():
        if new.row is not None and node.start >= new.refers_from:
            node.set_payload(new.segment(node.start, node.stop), node.snapshot)
    first, stop = parent.stop, new.stop
    edges = new.reply_at, *new.states, *range(0, stop, MAX_EDGE)
    inner = {at for at in edges if first < at < stop}
    for start, end in pairwise(sorted({first, *inner, stop}) if first < stop else []):
        child = Node(new.ids[start:end].copy(), start, parent, parent.totals)
        # a conversation that continues may continue again
        child.hits, child.generated = int(2 * new.shared > len(new.ids)), start >= new.reply_at
        child.set_payload(new.segment(start, end), None)
        parent.children[int(child.tokens[0])] = child
        parent = child
    for at, state in new.states.items():
        node = next(node for node in parent.path() if node.start < at <= node.stop)
        if at < node.stop:
            node = split(node, at - node.start)
        node.set_payload(node.segment, state)
    return parent


def remove(node: Node) -> None:
    """With all below it. Also drops the payload, because a `Match` may still refer to the nodes."""
    for each in (node, *nodes(node)):
        each.set_payload(None, None)
    cast("Node", node.parent).children.pop(int(node.tokens[0]))
    node.children = {}


def nodes(root: Node) -> Iterator[Node]:
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())
