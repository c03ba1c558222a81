"""Chooses what to evict first: the least time to recompute per byte, weighted by use."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from math import inf

from .tree import Node, Tally, nodes, remove, set_snapshot

Entry = tuple[float, int, bool, Node]
"""Value, order of entry, whether the whole node would go, node."""

ATTENTION_DEPTH = 8192
"""Depth in tokens at which a token costs about twice as much to compute as at the start."""
PINNED = 16
"""Weight of the newest path of a session."""
AWAITED = 256
"""The weight while tools run whose results will come, or if the client says that it comes back."""
PROVEN = 3
"""Hits up to which the weight of a node grows."""
GUESS = 0.1
"""Probability that a request resumes from an unused snapshot inside a message."""
FRESH = 0.3
"""Age, as a share of the prefix cache, below which it matters little."""


def evict(
    roots: Iterable[Node],
    tally: Tally,
    *,
    nbytes: float = inf,
    buffers: float = inf,
    clock: int,
    keep: frozenset[Node] = frozenset(),
    below: float = inf,
) -> None:
    """Evict the least valuable parts until `tally` is within `nbytes` and `buffers`. Evicts leaves,
    and snapshots of inner nodes, with less value than `below`. Nodes in `keep`, and nodes that rows
    use, lose only guesses. `clock`: the present time on the clock of `Node.used`."""
    order, held = count(), tally.nbytes

    def stays(node: Node) -> bool:
        return node in keep or node.needed

    def whole(node: Node) -> bool:
        return not node.children and not stays(node)

    def entry(node: Node) -> Entry:
        return value(node, clock, held), next(order), whole(node), node

    heap = [
        entry(node)
        for root in roots
        for node in nodes(root)
        if node.guessed or ((not node.children or node.snapshot is not None) and not stays(node))
    ]
    heapq.heapify(heap)
    while heap and (tally.nbytes > nbytes or tally.buffers > buffers) and heap[0][0] < below:
        _, _, leaf, node = heapq.heappop(heap)
        if leaf != whole(node):
            continue  # became a leaf, and has a newer entry as one
        if not leaf:
            set_snapshot(node, None)
            continue
        remove(node)
        parent = node.parent
        bare = parent is not None and parent.parent is not None and not parent.children
        if parent is not None and bare and not stays(parent):
            heapq.heappush(heap, entry(parent))


def value(node: Node, clock: int, held: int) -> float:
    """Value per byte of a leaf, or of an inner node's snapshot. Age is counted in bytes stored
    since the last use, so many small side requests age a long chat less than another long chat
    does."""
    if node.complete:
        recompute = len(node.tokens)
    elif node.snapshot is None:
        return 0.0  # no row can resume here
    else:
        recompute = node.stop - resumable_before(node)
    size = node.nbytes
    if node.children and node.snapshot is not None:
        size = node.snapshot.nbytes
    cost = recompute * (1 + node.stop / ATTENTION_DEPTH)
    if node.guessed:  # rows passed here without using it
        weight = GUESS / (1 + node.hits)
    else:
        pin = AWAITED if node.awaited else PINNED if node.sessions else 1
        weight = (1 + min(node.hits, PROVEN)) * pin
    disuse = (clock - node.used) / max(1, held)
    return cost * weight / max(1, size) / (FRESH + disuse)


def resumable_before(node: Node) -> int:
    """The last position above the node's end from which its path could be resumed. Guesses count
    only for other guesses, because they are evicted first."""
    above = node.parent
    while above is not None and not above.complete:
        if above.snapshot is not None and (node.guessed or not above.guessed):
            break
        above = above.parent
    return 0 if above is None else above.stop
