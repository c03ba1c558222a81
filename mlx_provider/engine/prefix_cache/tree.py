"""A radix tree of token ids, with content hashes for images. Intervals are half-open. No mlx."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ...records import Prompt

if TYPE_CHECKING:
    from .buffers import RowBuffers
    from .handover import Totals
    from .segments import Segment, Snapshot

Ids = NDArray[np.int64]
ID_BYTES = 8
MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""


@dataclass(frozen=True)
class CacheKey:
    """What determines the KV besides the tokens. Entries of different keys never match."""

    fingerprint: str  # `ModelInfo.fingerprint`: weights, adapter, quantisation, sliding window
    kv: str = ""  # the kind of the KV cache (its quantisation), and the code that computes it
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


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, stop)` of every path through it. Its parent ends where it starts."""

    tokens: Ids
    start: int
    parent: Node | None
    totals: Totals
    segment: Segment | None = None
    snapshot: Snapshot | None = None  # state at `stop`, if not every layer can be cut
    children: dict[int, Node] = field(default_factory=dict)  # by their first tokens
    used: int = 0  # `Totals.clock` at its last use
    hits: int = 0
    """Rows restored through it, plus 1 if it was stored as the continuation of a path."""
    generated: bool = False
    """Its tokens are from a reply: a prompt that differs here has tokenized the reply otherwise."""

    def set_payload(self, segment: Segment | None, snapshot: Snapshot | None) -> None:
        """Replace KV and state. Only this changes what the totals count of nodes."""
        totals, old, nbytes, buffers = self.totals, self.segment, self.nbytes, self.buffers
        self.segment, self.snapshot = segment, snapshot
        totals.version += 1
        totals.node_bytes += self.nbytes - nbytes
        totals.buffers += self.buffers - buffers
        totals.count_node(self, old)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether a row can resume at any of its tokens: the same for all nodes of a tree."""
        return self.segment is not None and self.segment.complete

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.segment, self.snapshot) if part is not None)

    @property
    def buffers(self) -> int:
        return sum(part.buffers for part in (self.segment, self.snapshot) if part is not None)

    @property
    def row(self) -> RowBuffers | None:
        """The row in whose buffers its tokens are. `None`: it has a copy."""
        return None if self.segment is None else self.segment.row

    @property
    def is_pinned(self) -> bool:
        """Whether rows use its buffers, so that its eviction frees nothing."""
        return self.row is not None and self.row.is_pinned

    @property
    def lost(self) -> bool:
        """Whether a pass of its row has failed, so that its buffers may be corrupted."""
        return self.row is not None and self.row.lost

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


def segment_of(node: Node) -> Segment:
    """Of any node but a root, which has none."""
    return cast("Segment", node.segment)


@dataclass(frozen=True)
class Match:
    """The stored path that is closest to a prompt: tokens `[0, shared)` match. A row can resume
    with `[0, length)`: fewer if a state is missing."""

    nodes: Sequence[Node]
    """Of the path. The last one may go on after `shared`."""
    shared: int
    length: int = 0
    total: int = 0  # tokens of the prompt
    diverged_at: int | None = None  # first position that differs from the path, if any
    branch: int = 0
    """Where the prompt and a stored prompt part: a third may part there, too. 0: they do not."""
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
    """As `PrefixCache.match`: at most `limit` ids match; a row resumes at multiples of `grid`."""
    nodes, node, shared = list[Node](), root, 0
    while shared < limit and shared == node.stop:
        child = node.children.get(int(ids[shared]))
        if child is None or child.lost:
            break
        shared += common(child.tokens, ids[shared:limit])
        nodes.append(node := child)
    following = [node] if shared < node.stop else node.children.values()
    others = [other for other in following if not other.lost] if shared < limit else []
    diverged_at = shared if others else None
    branch = shared if any(not other.generated for other in others) else 0
    length = _resumable(nodes, shared, ids, grid)
    return Match(nodes, shared, length, len(ids), diverged_at, branch, root.totals.version)


def _resumable(path: Sequence[Node], shared: int, ids: Ids, grid: int) -> int:
    """The tokens of a path with which a row can resume, never inside a media span."""
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
    segment = segment_of(node)
    first, rest = segment.slice(0, at), segment.slice(at, len(node.tokens))
    upper = replace(node, tokens=node.tokens[:at].copy(), segment=None, snapshot=None, children={})
    upper.set_payload(first, None)
    cast("Node", node.parent).children[int(node.tokens[0])] = upper
    node.set_payload(rest, node.snapshot)
    node.tokens = node.tokens[at:].copy()
    node.start += at
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    return upper


@dataclass(frozen=True)
class NewPath:
    """Tokens `[0, stop)` of a row, to store: all of them, until `fit_path` has cut it."""

    ids: Ids
    kv: Segment  # of the whole row, in its own arrays
    states: Mapping[int, Snapshot]  # by token count
    reply_at: int  # tokens before the reply
    shared: int  # tokens `[0, shared)` were stored before
    stop: int
    in_place: Segment | None = None
    """Tokens `[start, len(ids))`, if they can stay in the row's buffers. Others are copied."""
    doubled_bytes: int = 0  # of the row's tokens before `in_place`, which count twice

    @property
    def token_bytes(self) -> int:
        return self.kv.token_bytes + ID_BYTES

    @property
    def added_bytes(self) -> int:
        added = self.doubled_bytes + max(0, self.stop - self.shared) * self.token_bytes
        return added + sum(state.nbytes for state in self.states.values())

    def segment(self, start: int, stop: int) -> Segment:
        """Tokens `[start, stop)`, in place or copied."""
        part = self.in_place
        if part is not None and start >= part.start:
            return part.slice(start - part.start, stop - part.start)
        return self.kv.slice(start, stop)


def split_path(found: Match, new: NewPath) -> list[Node]:
    """The stored nodes of a new path. The last one is split where the new path leaves it, unless
    there is nothing to add: all its tokens are stored, and it needs no state."""
    path = [*found.nodes]
    is_stored = new.kv.complete and new.shared == len(new.ids)
    if path and found.shared < path[-1].stop and not is_stored:
        path[-1] = split(path[-1], found.shared - path[-1].start)
    return path


def add_nodes(parent: Node, new: NewPath) -> Node:
    """Add tokens `[parent.stop, new.stop)` below `parent`, and the new states. Stored copies of
    tokens that are in place go. Returns the last node."""
    for node in parent.path():
        if new.in_place is not None and node.start >= new.in_place.start:
            node.set_payload(new.segment(node.start, node.stop), node.snapshot)
    edges = {new.reply_at, *new.states, *range(0, new.stop, MAX_EDGE), new.stop}
    for end in sorted(at for at in edges if parent.stop < at <= new.stop):
        start = parent.stop
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
    """With all below it. Also drops the payloads, as a `Match` may still refer to the nodes."""
    for removed in (node, *nodes(node)):
        removed.set_payload(None, None)
    cast("Node", node.parent).children.pop(int(node.tokens[0]))
    node.children = {}


def nodes(root: Node) -> Iterator[Node]:
    """All below the root or another node, parents first."""
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())
