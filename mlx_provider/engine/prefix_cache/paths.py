"""How a path of the tree is stored: the part that fits its budget, its segments and its snapshots.

Imports no mlx.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .tree import ID_BYTES, Ids, Match, Node, segment_of, split

if TYPE_CHECKING:
    from .buffers import RowBuffers
    from .segments import RowParts, Snapshot

RECENT = 3
"""Message ends kept per path besides the end of the system prompt."""
FORKS = 2
"""Further snapshots kept per path, where prompts have differed."""
NEAR = 16
"""This many tokens are cheaper to compute again than to store with a state."""
MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""


@dataclass(frozen=True)
class NewPath:
    """A row to store."""

    ids: Ids
    row: RowParts
    states: Mapping[int, Snapshot]
    """By token count."""
    prompted: int
    """Tokens before the reply."""
    own: RowBuffers | None
    """The row's buffers, if nodes can refer to them."""

    @property
    def token_bytes(self) -> int:
        return self.row.token_bytes + ID_BYTES


def fit(path: Sequence[Node], new: NewPath, budget: int) -> tuple[int, set[int]]:
    """The longest head of a new path from which a row can resume, and the snapshots that fit with
    it. `path`: its stored nodes.

    The next prompt may tokenize the reply differently, so a head that ends in the reply also keeps
    the last snapshot of the prompt.
    """
    length = len(new.ids)
    held = {node.stop: node.snapshot for node in path if node.snapshot is not None}
    sizes = {at: state.nbytes for at, state in {**new.states, **held}.items()}
    shared = path[-1].stop if path else 0

    def size(stop: int, kept: Collection[int] = ()) -> int:
        nbytes = max(0, stop - shared) * new.token_bytes + sum(sizes[at] for at in kept)
        for node in path:
            tokens = max(0, min(stop, node.stop) - node.start)
            nbytes += node.token_bytes * tokens // len(node.tokens)
        return nbytes

    if size(max(length, shared), sizes) <= budget:
        return length, {*sizes}
    whole = length if new.row.complete else max((n.stop for n in path if n.complete), default=0)
    stop, kept = bisect_right(range(1, whole + 1), budget, key=size), set[int]()
    fitting = [at for at in sorted(sizes) if at > stop and size(at, [at]) <= budget]
    safe = [at for at in fitting if at <= new.prompted][-1:]
    for end in reversed(fitting):
        if size(max([end, *safe]), {end, *safe}) <= budget:
            stop, kept = max([end, *safe]), {end, *safe}
            break
    others = sorted(at for at in sizes if at < stop and at not in kept)
    for at in [*others[:1], *reversed(others[1:])] if kept else []:
        kept |= {at} if size(stop, {*kept, at}) <= budget else set()
    return stop, kept


def refers(new: NewPath, path: Sequence[Node]) -> bool:
    """Whether the whole path can refer to the row's own buffers, so that no token is held twice.
    Its stored nodes must be copies of the row's own tokens alone, or refer to the buffers."""
    own = new.own
    if own is None or (new.row.complete and new.row.windows):
        return False

    def fits(node: Node) -> bool:
        if node.start < own.first:
            return node.row is own.base
        return node.row in (None, own) and segment_of(node).layers == new.row.shape

    return all(node.stop <= len(new.ids) and fits(node) for node in path)


def shared_path(found: Match, new: NewPath) -> list[Node]:
    """The stored nodes of the path. The last node is split where the path leaves it."""
    path = [node for node, _ in found.steps]
    agreed = found.steps[-1][1] if path else 0
    whole = new.row.complete and found.shared == len(new.ids)
    if path and agreed < len(path[-1].tokens) and not whole:
        path[-1] = split(path[-1], agreed)
    return path


def cut_back(path: Sequence[Node], stop: int, kept: Set[int], length: int) -> list[Node]:
    """The stored nodes of a head, with the snapshots that it keeps. `length`: tokens of the whole
    path."""
    nodes = [node for node in path if node.start < stop]
    if nodes and stop < nodes[-1].stop and stop < length:
        nodes[-1] = split(nodes[-1], stop - nodes[-1].start)
    for node in nodes:
        if node.snapshot is not None and node.stop not in kept:
            node.hold(node.segment, None)
    return nodes


def grow(
    parent: Node,
    new: NewPath,
    stop: int,
    states: Mapping[int, Snapshot],
    *,
    own: RowBuffers | None,
    continued: bool,
) -> Node:
    """Add tokens `[parent.stop, stop)` of a path below `parent`, and states. Returns the last
    node."""
    first = parent.stop
    edges = range(-(-first // MAX_EDGE) * MAX_EDGE, stop, MAX_EDGE)
    inner = {at for at in {new.prompted, *states, *edges} if first < at < stop}
    for start, end in pairwise(sorted({first, *inner, stop}) if first < stop else []):
        complete, tokens = new.row.complete and parent.complete, new.ids[start:end].copy()
        child = Node(tokens, start, parent, complete, parent.totals)
        # a conversation that continues may continue again
        child.hits, child.generated = int(continued), start >= new.prompted
        child.hold(new.row.cut(start, end, own), None)
        parent.children[int(tokens[0])] = child
        parent = child
    for at, state in states.items():
        node = next(node for node in parent.path() if node.start < at <= node.stop)
        if at < node.stop and not node.complete:
            node = split(node, at - node.start)
        node.hold(node.segment, None if node.complete else state)
    return parent


def prune(leaf: Node) -> None:
    """Keep at most `1 + RECENT + FORKS` snapshots of a path: the first, the last, and the last
    from which several paths continue."""
    holders = [node for node in leaf.path() if node.snapshot is not None]
    ends: list[Node] = []
    for node in holders:
        # the end of a prompt saves almost nothing after that of its last message, once the path
        # continues
        if not ends or node.stop - ends[-1].stop >= NEAR or node is holders[-1]:
            ends.append(node)
    forks = [node for node in ends if len(node.children) > 1]
    kept = {*ends[:1], *ends[1:][-RECENT:], *forks[-FORKS:]}
    for node in holders:
        if node not in kept:
            node.hold(node.segment, None)
