"""A radix tree over token ids, in which content hashes replace images, and the count of its bytes.

Imports no mlx.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ...records import Prompt

if TYPE_CHECKING:
    from .segments import Segment, Snapshot

Ids = NDArray[np.int64]
ID_BYTES = 8


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


def outside_spans(ids: Ids, at: int) -> int:
    """The largest position <= `at` that is not inside a media span."""
    if at >= len(ids) or ids[at] >= 0 or ids[at] % 2 == 0:
        return at
    before = ids[:at]
    starts = np.flatnonzero((before < 0) & (before % 2 == 0))
    return int(starts[-1]) if len(starts) else 0


@dataclass(slots=True)
class Tally:
    """Only the functions of this module change it."""

    nbytes: int = 0
    buffers: int = 0

    def add(self, node: Node) -> None:
        self.nbytes += node.nbytes
        self.buffers += node.buffers

    def remove(self, node: Node) -> None:
        self.nbytes -= node.nbytes
        self.buffers -= node.buffers


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, stop)` of every path through it. Its parent ends where it starts."""

    tokens: Ids
    start: int
    parent: Node | None
    segment: Segment | None
    tally: Tally
    complete: bool
    """Whether a path may resume at any of its tokens. Then so may all its ancestors."""
    snapshot: Snapshot | None = None
    """State at `stop`, if not every layer can be cut. `set_snapshot` changes it."""
    children: dict[int, Node] = field(default_factory=dict)
    used: int = 0
    """The prefix cache's clock: bytes stored so far, plus one per use."""
    hits: int = 0
    """Number of rows restored through it. Starts at 1 if it continued a stored path."""
    generated: bool = False
    """Its tokens are from a reply: a prompt that leaves it has tokenized the reply differently."""
    resumed: int = 0
    """Rows that resumed from its snapshot, or would have if there had been one."""
    sessions: dict[str, bool] = field(default_factory=dict)
    """Sessions whose newest path includes it, each with whether it is `awaited`."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def token_bytes(self) -> int:
        return self.tokens.nbytes + (0 if self.segment is None else self.segment.nbytes)

    @property
    def nbytes(self) -> int:
        return self.token_bytes + (0 if self.snapshot is None else self.snapshot.nbytes)

    @property
    def buffers(self) -> int:
        return sum(part.buffers for part in (self.segment, self.snapshot) if part is not None)

    @property
    def needed(self) -> bool:
        """Whether its eviction frees nothing."""
        return self.segment is not None and self.segment.needed

    @property
    def guessed(self) -> bool:
        """Whether its snapshot is a guess that no row has needed yet."""
        return self.snapshot is not None and self.snapshot.inside and not self.resumed

    @property
    def awaited(self) -> bool:
        """Whether the next request of a session through it will come."""
        return any(self.sessions.values())

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
    """The stored path that is closest to a prompt. A row can resume with the tokens `[0, length)`:
    less than `[0, shared)`, which are stored, if a state is missing."""

    steps: tuple[tuple[Node, int], ...]
    """Nodes along the path, each with the number of its tokens that match."""
    shared: int
    length: int = 0
    asked: int = 0
    """Tokens of the prompt."""
    stateful: Node | None = None
    """Its snapshot is needed."""
    diverged_at: int | None = None
    """First position that differs from the path, if any."""
    stored_token: int | None = None
    branch: int = 0
    """`diverged_at`, if another prompt continues there. 0 if at most a reply does."""
    version: int = 0
    counted: bool = True
    """Whether a client has asked for the prompt, so that it counts as a look-up."""

    @property
    def path(self) -> tuple[Node, ...]:
        return tuple(node for node, _ in self.steps if node.start < self.length)

    @property
    def complete(self) -> bool:
        return all(node.complete for node, _ in self.steps)

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.stateful is None else self.stateful.snapshot


def new_root(tally: Tally | None = None) -> Node:
    return Node(np.empty(0, np.int64), 0, None, None, tally or Tally(), complete=True)


def match(root: Node, ids: Ids, limit: int, version: int = 0) -> Match:
    """The longest stored prefix of `ids`, of at most `limit` tokens."""
    steps: list[tuple[Node, int]] = []
    node, at, others = root, 0, list[Node]()
    while at < limit:
        child = node.children.get(int(ids[at]))
        if child is None:
            others = sorted(node.children.values(), key=lambda c: -c.used)
            break
        agreed = common(child.tokens, ids[at:limit])
        steps.append((child, agreed))
        at += agreed
        if agreed < len(child.tokens):
            others = [child] if at < limit else []
            break
        node = child
    length, stateful = _resumable(steps, ids, at)
    stored = int(others[0].tokens[at - others[0].start]) if others else None
    branch = 0 if all(other.generated for other in others) else at
    return Match(
        tuple(steps),
        at,
        length,
        len(ids),
        stateful,
        at if others else None,
        stored,
        branch,
        version,
    )


def _resumable(steps: Sequence[tuple[Node, int]], ids: Ids, shared: int) -> tuple[int, Node | None]:
    """Where a row can resume, never inside a media span, and the node whose snapshot it needs."""
    usable = outside_spans(ids, shared)
    length, stateful = 0, None
    for node, agreed in steps:
        if node.complete:
            length, stateful = min(usable, node.start + agreed), None
        elif (
            node.snapshot is not None
            and agreed == len(node.tokens)
            and node.stop == outside_spans(ids, node.stop) <= usable
        ):
            length, stateful = node.stop, node
    return length, stateful


def common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def split(node: Node, at: int) -> Node:
    """Split a node after `at` of its tokens. Returns the new upper part; `node` remains the lower
    part, with snapshot and children."""
    if node.parent is None or node.segment is None or not 0 < at < len(node.tokens):
        raise ValueError(f"no cut at {at} of {len(node.tokens)} tokens")
    head, tail = node.segment.slice(0, at), node.segment.slice(at, len(node.tokens))
    upper = Node(
        node.tokens[:at].copy(),
        node.start,
        node.parent,
        head,
        node.tally,
        complete=node.complete,
        used=node.used,
        hits=node.hits,
        generated=node.generated,
        sessions=dict(node.sessions),
    )
    node.tally.remove(node)
    node.segment = tail
    node.parent.children[int(upper.tokens[0])] = upper
    node.tokens = node.tokens[at:].copy()
    node.start += at
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    node.tally.add(upper)
    node.tally.add(node)
    return upper


def add(parent: Node, tokens: Ids, segment: Segment, *, complete: bool) -> Node:
    """`parent` must have no child with the same first token."""
    if int(tokens[0]) in parent.children:
        raise ValueError("a child with this first token exists")
    stop = parent.stop
    complete = complete and parent.complete
    node = Node(tokens.copy(), stop, parent, segment, parent.tally, complete)
    parent.children[int(tokens[0])] = node
    node.tally.add(node)
    return node


def remove(leaf: Node) -> None:
    """Also drops the payload, because a `Match` may still refer to the node."""
    if leaf.parent is None or leaf.children:
        raise ValueError("only a leaf can be removed")
    del leaf.parent.children[int(leaf.tokens[0])]
    leaf.tally.remove(leaf)
    leaf.segment = leaf.snapshot = None


def remove_below(node: Node) -> None:
    for each in [node, *nodes(node)][::-1]:
        remove(each)


def set_segment(node: Node, segment: Segment) -> None:
    """The new payload must be equal."""
    node.tally.remove(node)
    node.segment = segment
    node.tally.add(node)


def set_snapshot(node: Node, state: Snapshot | None) -> None:
    node.tally.remove(node)
    node.snapshot = state
    node.tally.add(node)


def nodes(root: Node) -> Iterator[Node]:
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())


def check(root: Node) -> int:
    """Raises `AssertionError` if an invariant of `Node` is broken."""
    total = 0
    for node in nodes(root):
        parent = node.parent
        if parent is None or parent.children.get(int(node.tokens[0])) is not node:
            raise AssertionError(f"{node.start}: parent and child disagree")
        if node.start != parent.stop or len(node.tokens) == 0:
            raise AssertionError(f"{node.start}: does not start where its parent ends")
        if node.segment is None or node.segment.length != len(node.tokens):
            raise AssertionError(f"{node.start}: payload of another length")
        if node.complete and not parent.complete:
            raise AssertionError(f"{node.start}: complete below an incomplete parent")
        if not node.sessions.keys() <= parent.sessions.keys() and parent.parent is not None:
            raise AssertionError(f"{node.start}: pinned below an unpinned parent")
        if node.used > parent.used and parent.parent is not None:
            raise AssertionError(f"{node.start}: used later than its parent")
        total += node.nbytes
    return total
