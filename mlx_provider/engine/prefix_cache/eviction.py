"""Chooses what to evict, and how much of a path fits the budget. Imports no mlx.

The least time to recompute per byte goes first; the newest path of a session stays longest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from .tree import Node, remove, split

if TYPE_CHECKING:
    from .segments import Snapshot

MAX_SESSIONS = 256
"""The least recently used session loses its pin first."""
LIVE_TURNS = 16
"""A session counts as gone this many stored paths after it last returned. A request stores two."""
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


class Sessions:
    def __init__(self) -> None:
        self._known: dict[str, tuple[Node, int, float]] = {}
        """The end of the newest path, of which it may be only a head; the bytes of the whole path;
        and the turn of the last return after another session's turn. Oldest first."""
        self._turn = 0
        self._last = ""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, session: str) -> bool:
        return session in self._known

    def pin(self, session: str, leaf: Node, wanted: int, *, awaited: bool) -> None:
        """Mark the path to `leaf` in place of the session's previous path."""
        self._turn += 1
        returned = self._unpin(session)
        if returned is None:
            returned = -inf
        elif session != self._last:
            returned = self._turn
        self._last = session
        self._known[session] = leaf, wanted, returned
        for node in leaf.path():
            node.sessions[session] = awaited
        while len(self._known) > MAX_SESSIONS:
            self._unpin(next(iter(self._known)))

    def share(self, session: str | None, budget: int) -> tuple[int, Callable[[], list[Node]]]:
        """The part of `budget` bytes that a path of the session may use, and the nodes that others
        keep. Sessions that take turns each keep the head of their path: more than an equal share
        would be evicted before their next turn. A session that has never returned keeps none."""
        if session is None:
            return budget, list
        gone = self._turn - LIVE_TURNS
        every = self._known.items()
        others = [each for name, each in every if each[2] > gone and name != session]
        equal = budget // (1 + len(others))
        left = budget - sum(min(equal, wanted) for _, wanted, _ in others)
        return left, lambda: [node for leaf, _, _ in others for node in head(leaf, equal)]

    def clear(self) -> None:
        self._known.clear()

    def _unpin(self, session: str) -> float | None:
        leaf, _, returned = self._known.pop(session, (None, 0, None))
        for node in () if leaf is None else leaf.path():
            node.sessions.pop(session, None)
        return returned


def head(leaf: Node, nbytes: int) -> list[Node]:
    """The nodes of the longest head of a path within `nbytes` from which a row can resume."""
    found: list[Node] = []
    for node in [each for each in leaf.path() if each.segment is not None]:
        left = nbytes - sum(each.nbytes for each in found)
        tokens = left * len(node.tokens) // node.token_bytes
        if node.nbytes > left:
            found += [split(node, tokens)] if node.complete and tokens else []
            break
        found.append(node)
    while found and not found[-1].complete and found[-1].snapshot is None:
        found.pop()
    return found


def evict(
    nodes: Sequence[Node],
    nbytes: float,
    buffers: float,
    *,
    clock: int,
    keep: Collection[Node] = (),
) -> None:
    """Evict leaves, and snapshots of inner nodes, the least valuable first, until so many bytes and
    buffers are free. Nodes in `keep`, and nodes that rows use, lose only guesses. `clock`: the
    present time on the clock of `Node.used`."""
    order, held = count(), sum(node.nbytes for node in nodes)
    heap: list[tuple[float, int, bool, Node]] = []

    def goes_whole(node: Node) -> bool:
        return not (node.children or node in keep or node.needed)

    def consider(node: Node) -> None:
        whole, stays = goes_whole(node), node in keep or node.needed
        if whole or node.guessed or (node.snapshot is not None and not stays):
            heapq.heappush(heap, (value(node, clock, held), next(order), whole, node))

    for node in nodes:
        consider(node)
    while heap and (nbytes > 0 or buffers > 0):
        _, _, whole, node = heapq.heappop(heap)
        if whole != goes_whole(node):
            continue  # became a leaf, and has a newer entry as one
        nbytes, buffers = nbytes - node.nbytes, buffers - node.buffers
        if not whole:
            node.snapshot = None
            nbytes, buffers = nbytes + node.nbytes, buffers + node.buffers
            continue
        parent = node.parent
        remove(node)
        if parent is not None and parent.parent is not None and not parent.children:
            consider(parent)


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


def fit(
    path: Sequence[Node],
    length: int,
    token_bytes: int,
    states: Mapping[int, Snapshot],
    spare: Mapping[int, Snapshot],
    *,
    prompted: float,
    complete: bool,
    budget: int,
) -> tuple[int, set[int]]:
    """The longest head from which a row can resume, and the snapshots that fit with it.

    The next prompt may tokenize the reply differently, so a head that ends in the reply also keeps
    the last snapshot of the prompt.

    `path`: stored nodes that match completely. `length`: tokens of the whole path. `token_bytes`:
    of a token that is not stored. `states`: new snapshots by token count. `spare`: those kept only
    as the end of a shorter head. `prompted`: tokens before the reply.
    """
    held = {node.stop: node.snapshot for node in path if node.snapshot is not None}
    sizes = {at: state.nbytes for at, state in {**spare, **states, **held}.items()}
    shared = path[-1].stop if path else 0

    def size(stop: int, kept: Collection[int] = ()) -> int:
        nbytes = max(0, stop - shared) * token_bytes + sum(sizes[at] for at in kept)
        for node in path:
            tokens = max(0, min(stop, node.stop) - node.start)
            nbytes += node.token_bytes * tokens // len(node.tokens)
        return nbytes

    guessed = {node.stop for node in path if node.guessed}
    if size(max(length, shared), {*states, *held} - guessed) <= budget:
        return length, {*states, *held}
    whole = length if complete else max((n.stop for n in path if n.complete), default=0)
    stop, kept = bisect_right(range(1, whole + 1), budget, key=size), set[int]()
    ends = [at for at in sorted(sizes) if at > stop and size(at, [at]) <= budget]
    safe = [at for at in ends if at <= prompted][-1:]
    for end in reversed(ends):
        if size(max([end, *safe]), {end, *safe}) <= budget:
            stop, kept = max([end, *safe]), {end, *safe}
            break
    others = sorted(at for at in {*states, *held} if at < stop and at not in kept)
    for at in [*others[:1], *reversed(others[1:])] if kept else []:
        kept |= {at} if size(stop, {*kept, at}) <= budget else set()
    return stop, kept
