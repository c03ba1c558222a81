"""A radix tree over token ids, in which content hashes replace images, and how its paths grow.

Imports no mlx.
"""

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
    from .segments import RowParts, Segment, Snapshot

Ids = NDArray[np.int64]
ID_BYTES = 8
RECENT = 3
"""Message ends kept per path besides the end of the system prompt."""
INSIDE = 2
"""Further snapshots kept per path: guesses, and branch points of prompts."""
NEAR = 16
"""This many tokens are cheaper to compute again than to store with a state."""
MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""


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


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, stop)` of every path through it. Its parent ends where it starts."""

    tokens: Ids
    start: int
    parent: Node | None
    segment: Segment | None
    complete: bool
    """Whether a path may resume at any of its tokens. Then so may all its ancestors."""
    snapshot: Snapshot | None = None
    """State at `stop`, if not every layer can be cut."""
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
    def lost(self) -> bool:
        """Whether the row in whose buffers it is has failed."""
        return self.segment is not None and self.segment.held is not None and self.segment.held.lost

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


def new_root() -> Node:
    return Node(np.empty(0, np.int64), 0, None, None, complete=True)


def match(root: Node, ids: Ids, limit: int, version: int = 0) -> Match:
    """The longest stored prefix of `ids`, of at most `limit` tokens."""
    steps: list[tuple[Node, int]] = []
    node, at, others = root, 0, list[Node]()
    while at < limit:
        child = node.children.get(int(ids[at]))
        if child is None or child.lost:
            usable = (each for each in node.children.values() if not each.lost)
            others = sorted(usable, key=lambda each: -each.used)
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
    left_at = at if others else None
    return Match(
        tuple(steps), at, length, len(ids), stateful, left_at, stored, branch, version
    )  # fmt: skip


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
    """Split a node, which is no root, after `at` of its tokens. Returns the new upper part; `node`
    remains the lower part, with snapshot and children."""
    whole, first, parent = segment_of(node), int(node.tokens[0]), cast("Node", node.parent)
    upper = replace(
        node, tokens=node.tokens[:at].copy(), segment=whole.slice(0, at), snapshot=None,
        children={}, resumed=0, sessions=dict(node.sessions),
    )  # fmt: skip
    parent.children[first] = upper
    node.segment = whole.slice(at, len(node.tokens))
    node.tokens = node.tokens[at:].copy()
    node.start += at
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    return upper


def remove(node: Node) -> None:
    """With all below it. Also drops the payload, because a `Match` may still refer to the nodes."""
    for each in (node, *nodes(node)):
        each.segment = each.snapshot = None
    cast("Node", node.parent).children.pop(int(node.tokens[0]))
    node.children = {}


def refers(own: RowBuffers | None, row: RowParts, path: Sequence[Node], length: int) -> bool:
    """Whether the whole path can refer to the row's own buffers, so that no token is held twice.
    Its stored nodes must be copies of the row's own tokens alone, or refer to the buffers."""
    if own is None or (row.complete and row.windows):
        return False

    def fits(node: Node) -> bool:
        segment = segment_of(node)
        if node.start < own.first:
            return segment.held is own.base
        return segment.held in (None, own) and segment.layers == row.shape

    return all(node.stop <= length and fits(node) for node in path)


def shared_path(found: Match, length: int, *, complete: bool) -> list[Node]:
    """The stored nodes of the path. The last node is split where the path leaves it."""
    path = [node for node, _ in found.steps]
    agreed = found.steps[-1][1] if path else 0
    if path and agreed < len(path[-1].tokens) and not (complete and found.shared == length):
        path[-1] = split(path[-1], agreed)
    return path


def cut_back(path: Sequence[Node], stop: int, kept: Set[int], length: int) -> list[Node]:
    """The stored nodes of a head, with the snapshots that it keeps. `length`: tokens of the whole
    path. A shorter head ends in a snapshot that is not a guess."""
    nodes = [node for node in path if node.start < stop]
    if nodes and stop < nodes[-1].stop and stop < length:
        nodes[-1] = split(nodes[-1], stop - nodes[-1].start)
    for node in nodes:
        if node.snapshot is not None and node.stop not in kept:
            node.snapshot = None
    if nodes and nodes[-1].guessed and stop < length:
        nodes[-1].resumed = 1
    return nodes


def grow(
    parent: Node,
    ids: Ids,
    row: RowParts,
    states: Mapping[int, Snapshot],
    *,
    prompted: int,
    own: RowBuffers | None,
    continued: bool,
) -> Node:
    """Add tokens `[parent.stop, len(ids))` below `parent`, and states. Returns the last node."""
    first, stop = parent.stop, len(ids)
    edges = range(-(-first // MAX_EDGE) * MAX_EDGE, stop, MAX_EDGE)
    inner = {at for at in {prompted, *states, *edges} if first < at < stop}
    for start, end in pairwise(sorted({first, *inner, stop}) if first < stop else []):
        complete, tokens = row.complete and parent.complete, ids[start:end].copy()
        child = Node(tokens, start, parent, row.cut(start, end, own), complete)
        # a conversation that continues may continue again
        child.hits, child.generated = int(continued), start >= prompted
        parent.children[int(tokens[0])] = child
        parent = child
    for at, state in states.items():
        attach(parent, at, replace(state, inside=False))
    return parent


def attach(leaf: Node, at: int, state: Snapshot, *, wanted: bool = False) -> Node | None:
    """Attach a state at token `at` of the path. Returns its node, if that had no state. `wanted`: a
    row would have resumed there."""
    node = next((node for node in leaf.path() if node.start < at <= node.stop), None)
    if node is None or node.complete:
        return None
    if at < node.stop:
        node = split(node, at - node.start)
    if node.snapshot is not None:
        return None
    node.snapshot, node.resumed = state, int(wanted)
    return node


def prune(leaf: Node) -> bool:
    """Keep at most `1 + RECENT + INSIDE` snapshots of a path: the ends of the first and the
    last messages; inside messages the most resumed, then the last ones. Returns whether it dropped
    any."""
    holders = [node for node in leaf.path() if node.snapshot is not None]
    inside = [node for node in holders if node.snapshot is not None and node.snapshot.inside]
    ends: list[Node] = []
    for node in [node for node in holders if node not in inside]:
        # the end of a prompt saves almost nothing after that of its last message, once the path
        # continues
        if not ends or node.stop - ends[-1].stop >= NEAR or node is holders[-1]:
            ends.append(node)
    inside.sort(key=lambda node: (node.resumed, node.stop))
    kept = {*ends[:1], *ends[1:][-RECENT:], *inside[-INSIDE:]}
    for node in holders:
        if node not in kept:
            node.snapshot = None
    return len(kept) < len(holders)


def nodes(root: Node) -> Iterator[Node]:
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        if node.children:
            todo.extend(node.children.values())


def check(root: Node) -> None:
    """Raises `AssertionError` if an invariant of `Node` is broken."""
    for node in nodes(root):
        parent, length = cast("Node", node.parent), len(node.tokens)
        top, pinned = parent.parent is None, node.sessions.keys() <= parent.sessions.keys()
        rules = {
            "parent and child agree": parent.children.get(int(node.tokens[0])) is node,
            "it starts where its parent ends": node.start == parent.stop and length,
            "its payload has its length": node.segment and node.segment.length == length,
            "a complete node has a complete parent": parent.complete or not node.complete,
            "a pinned node has a pinned parent": top or pinned,
            "its parent was used as late": top or node.used <= parent.used,
        }
        for rule, holds in rules.items():
            if not holds:
                raise AssertionError(f"{node.start}: not true that {rule}")
