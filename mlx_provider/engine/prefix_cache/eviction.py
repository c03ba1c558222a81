"""Chooses what to evict, and how much of a path fits the budget. Imports no mlx.

The least time to recompute per byte goes first; the newest path of a session stays longest.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from .tree import ID_BYTES, Node, Tally, nodes, remove, set_snapshot, split

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


@dataclass(frozen=True)
class Share:
    nbytes: int
    """Most bytes of a session's path."""
    equal: int = 0
    others: Sequence[Node] = ()
    """The ends of paths that each keep `equal` bytes of their head."""

    def heads(self) -> list[Node]:
        return [node for leaf in self.others for node in head(leaf, self.equal)]


@dataclass
class Session:
    leaf: Node
    wanted: int
    """Bytes of the whole path, of which `leaf` may end only a head."""
    returned: float
    """When it last continued after another session's turn."""


class Sessions:
    def __init__(self) -> None:
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._turn = 0
        self._last = ""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, session: str) -> bool:
        return session in self._known

    def pin(self, session: str, leaf: Node, wanted: int, *, awaited: bool) -> None:
        """Mark the path to `leaf` in place of the session's previous path."""
        self._turn += 1
        before = self._unpin(session)
        returned = -inf if before is None else before.returned
        if before is not None and session != self._last:
            returned = self._turn
        self._last = session
        self._known[session] = Session(leaf, wanted, returned)
        for node in leaf.path():
            node.sessions[session] = awaited
        while len(self._known) > MAX_SESSIONS:
            self._unpin(next(iter(self._known)))

    def share(self, session: str | None, budget: int) -> Share:
        """The part of `budget` bytes that a path of the session may use. Sessions that take turns
        each keep the head of their path: more than an equal share would be evicted before their
        next turn. A session that has never returned keeps no share."""
        if session is None:
            return Share(budget)
        gone = self._turn - LIVE_TURNS
        every = self._known.items()
        others = [each for name, each in every if each.returned > gone and name != session]
        equal = budget // (1 + len(others))
        left = budget - sum(min(equal, each.wanted) for each in others)
        return Share(left, equal, [each.leaf for each in others])

    def clear(self) -> None:
        self._known.clear()

    def _unpin(self, session: str) -> Session | None:
        before = self._known.pop(session, None)
        for node in before.leaf.path() if before is not None else ():
            node.sessions.pop(session, None)
        return before


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
    roots: Iterable[Node],
    tally: Tally,
    *,
    nbytes: float = inf,
    buffers: float = inf,
    clock: int,
    keep: frozenset[Node] = frozenset(),
    below: float = inf,
) -> None:
    """Evict leaves, and snapshots of inner nodes, the least valuable first, until `tally` is within
    `nbytes` and `buffers`, or all that is left is worth `below` or more. Nodes in `keep`, and nodes
    that rows use, lose only guesses. `clock`: the present time on the clock of `Node.used`."""
    order, held = count(), tally.nbytes
    heap: list[tuple[float, int, bool, Node]] = []

    def goes_whole(node: Node) -> bool:
        return not (node.children or node in keep or node.needed)

    def consider(node: Node) -> None:
        whole = goes_whole(node)
        stays = node in keep or node.needed
        if whole or node.guessed or (node.snapshot is not None and not stays):
            heapq.heappush(heap, (value(node, clock, held), next(order), whole, node))

    for root in roots:
        for node in nodes(root):
            consider(node)
    while heap and (tally.nbytes > nbytes or tally.buffers > buffers) and heap[0][0] < below:
        _, _, whole, node = heapq.heappop(heap)
        if whole != goes_whole(node):
            continue  # became a leaf, and has a newer entry as one
        if not whole:
            set_snapshot(node, None)
            continue
        remove(node)
        above = node.parent
        if above is not None and above.parent is not None and not above.children:
            consider(above)


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


@dataclass(frozen=True)
class Fit:
    stop: int
    states: frozenset[int]
    new_bytes: int


def fit(
    path: Sequence[Node],
    length: int,
    token_bytes: int,
    states: Mapping[int, int],
    spare: Mapping[int, int],
    *,
    prompted: float,
    complete: bool,
    budget: int,
) -> Fit:
    """The longest head from which a row can resume, and the snapshots that fit with it.

    The next prompt may tokenize the reply differently, so a head that ends in the reply also keeps
    the last snapshot of the prompt.

    `path`: stored nodes that match completely. `length`: tokens of the whole path. `token_bytes`:
    of a token that is not stored. `states`: bytes of new snapshots by token count. `spare`: the
    same for those kept only as the end of a shorter head. `prompted`: tokens before the reply.
    """
    held = {node.stop: node.snapshot.nbytes for node in path if node.snapshot is not None}
    guessed = {node.stop for node in path if node.guessed}
    sizes = _Sizes(path, token_bytes + ID_BYTES)
    new = {at: size for at, size in states.items() if at not in held}
    needed = sum(size for at, size in held.items() if at not in guessed) + sum(new.values())
    if sizes.of(max(length, sizes.shared)) + needed <= budget:
        return Fit(length, frozenset({*held, *new}), sizes.beyond(length) + sum(new.values()))
    whole = length if complete else max((n.stop for n in path if n.complete), default=0)
    stop = sizes.reach(budget, whole)
    every = {**spare, **new, **held}
    ends = sorted(at for at in every if at > stop and sizes.of(at) + every[at] <= budget)
    safe = [at for at in ends if at <= prompted][-1:]
    choices = [{*safe, at} for at in ends]
    fitting = [ats for ats in choices if sizes.of(max(ats)) + _total(every, ats) <= budget]
    kept: set[int] = fitting[-1] if fitting else set()
    if kept:
        stop = max(kept)
        left = budget - sizes.of(stop) - _total(every, kept)
        others = sorted(at for at in {**new, **held} if at < stop and at not in kept)
        kept |= {*_within(left, [*others[:1], *reversed(others[1:])], every)}
    added = _total(every, kept - {*held})
    return Fit(stop, frozenset(kept), sizes.beyond(stop) + added)


def _total(sizes: Mapping[int, int], ats: Iterable[int]) -> int:
    return sum(sizes[at] for at in ats)


def _within(left: int, ats: Iterable[int], sizes: Mapping[int, int]) -> Iterable[int]:
    for at in ats:
        if sizes[at] <= left:
            left -= sizes[at]
            yield at


@dataclass(frozen=True)
class _Sizes:
    path: Sequence[Node]
    each: int

    @property
    def shared(self) -> int:
        return self.path[-1].stop if self.path else 0

    def of(self, stop: int) -> int:
        stored = 0
        for node in self.path:
            tokens = max(0, min(stop, node.stop) - node.start)
            stored += node.token_bytes * tokens // len(node.tokens)
        return stored + self.beyond(stop)

    def beyond(self, stop: int) -> int:
        """Bytes of the tokens between the stored ones and `stop`."""
        return max(0, stop - self.shared) * self.each

    def reach(self, budget: int, limit: int) -> int:
        for node in self.path:
            size = node.token_bytes
            if size > budget or node.stop > limit:
                within = node.start + budget * len(node.tokens) // size
                return min(within, limit)
            budget -= size
        return min(limit, self.shared + budget // self.each)
