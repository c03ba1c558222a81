"""What to forget first: the least time to recompute per byte, weighed by use."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from .tree import Node, nodes, remove

Entry = tuple[float, int, bool, Node]
"""Value, order of entry, whether it is a leaf, node."""

ATTENTION_DEPTH = 8192
"""Tokens after which recomputing one costs about twice as much as at the start."""
PINNED = 16
"""How much longer the newest path of a session is kept."""
PROVEN = 3
"""Hits up to which a node gains weight."""
FRESH = 0.3
"""Disuse, as a share of the prefix cache, below which it matters little."""


def evict(
    roots: Iterable[Node],
    need: int,
    *,
    clock: int,
    held: int,
    keep: frozenset[Node] = frozenset(),
    buffers: int = 0,
) -> tuple[int, int]:
    """Free at least `need` bytes and `buffers` buffers if there are as many; both as freed.

    Takes leaves, and snapshots of inner nodes, the least valuable first. Nodes
    in `keep` stay as they are. `clock`: now, on the clock of `Node.used`; `held`: bytes of all.
    """
    order = count()

    def entry(node: Node) -> Entry:
        return value(node, clock, held), next(order), not node.children, node

    heap = [
        entry(node)
        for root in roots
        for node in nodes(root)
        if node not in keep and (not node.children or node.snapshot is not None)
    ]
    heapq.heapify(heap)
    freed = dropped = 0
    while heap and (freed < need or dropped < buffers):
        _, _, leaf, node = heapq.heappop(heap)
        if leaf != (not node.children):
            continue  # has become a leaf since, and was entered again as one
        if not leaf:
            if node.snapshot is not None:
                freed += node.snapshot.nbytes
                dropped += node.snapshot.buffers
            node.snapshot = None
            continue
        freed += node.nbytes
        dropped += node.buffers
        remove(node)
        parent = node.parent
        bare = parent is not None and parent.parent is not None and not parent.children
        if parent is not None and bare and parent not in keep:
            heapq.heappush(heap, entry(parent))
    return freed, dropped


def value(node: Node, clock: int, held: int) -> float:
    """What keeping a leaf, or an inner node's snapshot, is worth per byte.

    Disuse is measured by what came in since, as a share of the prefix cache: many small side
    requests age a long chat less than one other long chat does.
    """
    if node.complete:
        recompute = len(node.tokens)
    elif node.snapshot is None:
        return 0.0  # nothing can resume here
    else:
        recompute = node.stop - resumable_before(node)
    size = node.nbytes
    if node.children and node.snapshot is not None:
        size = node.snapshot.nbytes
    cost = recompute * (1 + node.stop / ATTENTION_DEPTH)
    weight = (1 + min(node.hits, PROVEN)) * (PINNED if node.sessions else 1)
    disuse = (clock - node.used) / max(1, held)
    return cost * weight / max(1, size) / (FRESH + disuse)


def resumable_before(node: Node) -> int:
    """The last position above the node's end from which its path could be resumed."""
    above = node.parent
    while above is not None and above.snapshot is None and not above.complete:
        above = above.parent
    return 0 if above is None else above.stop
