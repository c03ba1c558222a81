"""Chooses how much of a path is stored, and what is evicted: what takes the least time to recompute
per byte goes first, the newest path of a session last. Imports no mlx."""

import heapq
from bisect import bisect_right
from collections.abc import Collection, Hashable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from math import inf

from .handover import Totals, inherit
from .tree import ID_BYTES, NewPath, Node, nodes, remove, segment_of, split

MAX_SESSIONS = 256
"""The least recently used session loses its pin first."""
LIVE_TURNS = 16
"""A session counts as gone this many stored paths after it last returned. A request stores two."""
ATTENTION_DEPTH = 8192
"""Depth in tokens at which a token costs about twice as much to compute as at the start."""
NEWEST = 16
"""Factor on the value of nodes of the newest path of a session. Other nodes have 1."""
AWAITED = 256
"""The same while tools run whose results will come, or if the client has announced its return."""
PROVEN = 3
"""Hits up to which the value of a node grows."""
FRESH = 0.3
"""Ages far below this matter little. They are counted in contents of the whole prefix cache."""


@dataclass(frozen=True)
class Pin:
    """The newest path of a session."""

    leaf: Node  # its last stored node, which may have been evicted since
    nbytes: int  # of the whole path
    awaited: bool  # whether the next request of the session will come
    returned: float  # the turn in which the session last came back after another one, or `-inf`


class Sessions(dict[Hashable, Pin]):
    """The newest paths by session, the oldest first."""

    turn = 0  # paths that sessions have stored
    last: Hashable = ""  # the session that stored the last one

    def pin(self, session: Hashable, leaf: Node, nbytes: int, *, awaited: bool) -> None:
        """Replace the newest path of a session."""
        self.turn += 1
        before = self.pop(session, None)
        returned = -inf if before is None else before.returned
        if before is not None and session != self.last:
            returned = self.turn
        self.last = session
        self[session] = Pin(leaf, nbytes, awaited, returned)
        if len(self) > MAX_SESSIONS:
            del self[next(iter(self))]

    def share(self, session: Hashable, budget: int) -> int:
        """The part of `budget` bytes that a path of the session may use. Sessions that take turns
        each keep the start of their path: more than an equal share would be evicted before their
        next turn. A session that has never returned keeps none."""
        others, equal = self._others(session, budget)
        return budget - sum(min(equal, pin.nbytes) for pin in others)

    def split_at_shares(self, session: Hashable, budget: int) -> list[Node]:
        """The nodes that other sessions keep. Splits a node where the share of one ends."""
        others, equal = self._others(session, budget)
        return [node for pin in others for node in _split_at(pin.leaf, equal)]

    def _others(self, session: Hashable, budget: int) -> tuple[list[Pin], int]:
        """The pins of sessions that take turns with this one, and an equal share in bytes."""
        oldest = inf if session is None else self.turn - LIVE_TURNS
        others = [pin for name, pin in self.items() if pin.returned > oldest and name != session]
        return others, budget // (1 + len(others))

    def weights(self) -> dict[Node, int]:
        """The factor on the value of each node of these paths."""
        pins = sorted(self.values(), key=lambda pin: pin.awaited)  # of two factors, the larger
        return {n: AWAITED if pin.awaited else NEWEST for pin in pins for n in pin.leaf.path()}


def _split_at(leaf: Node, nbytes: int) -> list[Node]:
    """The first nodes of a path, within `nbytes`, from which a row can resume. May split a node."""
    found: list[Node] = []
    for node in [node for node in leaf.path() if node.segment is not None]:
        left = nbytes - sum(above.nbytes for above in found)
        if node.nbytes > left:
            token_bytes = segment_of(node).token_bytes + ID_BYTES
            tokens = len(node.tokens) + (left - segment_of(node).nbytes) // token_bytes
            found += [split(node, tokens)] if node.complete and tokens > 0 else []
            break
        found.append(node)
    while found and not found[-1].complete and found[-1].snapshot is None:
        found.pop()
    return found


def fit_path(new: NewPath, stored: list[Node], budget: int) -> tuple[NewPath, list[Node]]:
    """What of a new path fits into `budget` bytes, with only those states that are not stored yet,
    and which of its `stored` nodes are a part of that. Removes their snapshots that do not fit."""
    stop, states_at = fit(stored, new, budget)
    if new.in_place is not None and stop < len(new.ids):  # a part of a row is copied
        new = replace(new, in_place=None, doubled_bytes=0)
        stop, states_at = fit(stored, new, budget)
    path = [node for node in stored if node.start < stop]
    if path and stop < min(path[-1].stop, len(new.ids)):
        path[-1] = split(path[-1], stop - path[-1].start)
    for node in path:
        if node.snapshot is not None and node.stop not in states_at:
            node.set_payload(node.segment, None)
    states_at -= {node.stop for node in path if node.snapshot is not None}
    states = {at: state for at, state in new.states.items() if at in states_at}
    return replace(new, stop=stop, states=states), path


def fit(path: Sequence[Node], new: NewPath, budget: int) -> tuple[int, set[int]]:
    """How much of a new path fits into `budget` bytes: tokens `[0, stop)`, with which a row can
    resume, and snapshots. Returns `stop` and their positions. `path`: the stored nodes.

    The next prompt may tokenize the reply differently, so a path that is cut in the reply also
    keeps the last snapshot of the prompt."""
    length = len(new.ids)
    stored = {node.stop: node.snapshot for node in path if node.snapshot is not None}
    sizes = {at: state.nbytes for at, state in {**new.states, **stored}.items()}
    shared = path[-1].stop if path else 0

    def size(stop: int, states_at: Collection[int] = ()) -> int:
        nbytes = new.doubled_bytes + max(0, stop - shared) * new.token_bytes
        nbytes += sum(sizes[at] for at in states_at)
        for node in path:
            tokens = max(0, min(stop, node.stop) - node.start)
            nbytes += segment_of(node).nbytes * tokens // len(node.tokens)
        return nbytes

    if size(max(length, shared), sizes) <= budget:
        return length, {*sizes}
    ends = range(1, length + 1) if new.kv.complete else ()  # else only a state is an end
    stop, states_at = bisect_right(ends, budget, key=size), set[int]()
    fitting = [at for at in sorted(sizes) if at > stop and size(at, [at]) <= budget]
    safe = [at for at in fitting if at <= new.reply_at][-1:]
    for end in reversed(fitting):
        chosen = {end, *safe}
        if size(max(chosen), chosen) <= budget:
            stop, states_at = max(chosen), chosen
            break
    others = sorted(at for at in sizes if at < stop and at not in states_at)
    for at in [*others[:1], *reversed(others[1:])]:
        if size(stop, {*states_at, at}) <= budget:
            states_at.add(at)
    return stop, states_at


def shrink(
    roots: Collection[Node], totals: Totals, sessions: Sessions, limit: float, keep: Set[Node]
) -> None:
    """Free memory until the totals fit `limit`, if rows and `keep` permit. If spare capacity is not
    enough, nodes go, then the spare capacity of rows that have lost nodes, then that of others."""
    if totals.is_within(limit):
        return
    if totals.node_bytes <= limit:
        totals.trim_spare(limit)
    stored, before = {row: row.stored for row in totals.rows}, -1
    # again while anything goes: a prefix can go once no entry continues it
    while not totals.is_within(limit) and totals.nbytes != before:
        before = totals.nbytes
        evict_nodes(roots, totals, sessions, limit, keep)
    for row in [row for row in totals.rows if row.stored < stored[row]]:
        totals.trim(row)
    totals.trim_spare(limit)


def evict_nodes(
    roots: Collection[Node], totals: Totals, sessions: Sessions, limit: float, keep: Set[Node]
) -> None:
    """Evict leaves, and snapshots of inner nodes, the least valuable first, until the totals fit
    `limit`. Nodes in `keep`, and nodes that rows use, stay, and those above them."""
    every = [node for root in roots for node in nodes(root)]  # parents first
    # a node above a row in use never becomes a leaf, but may drop its copy of the row's tokens
    for node in reversed(every):
        is_last = node.row is None or node.row.path[-1] is node
        if is_last and not node.is_pinned and node not in keep:
            inherit(node)  # from a child that has its tokens, too: its own copy goes
    order, stored, weights = count(), totals.nbytes, sessions.weights()
    heap: list[tuple[float, int, bool, Node]] = []

    def consider(node: Node) -> None:
        is_leaf = not node.children
        if (is_leaf or node.snapshot is not None) and not (node in keep or node.is_pinned):
            worth = value(node, totals.clock, stored) * weights.get(node, 1)
            heapq.heappush(heap, (worth, next(order), is_leaf, node))

    for node in every:
        consider(node)
    while heap and not totals.is_within(limit):
        _, _, is_leaf, node = heapq.heappop(heap)
        if is_leaf:
            remove(node)
            parent = node.parent
            if parent and parent.parent and not parent.children:  # it is no root
                consider(parent)
        elif node.children:  # else it has become a leaf, which is in the heap, too
            node.set_payload(node.segment, None)


def value(node: Node, clock: int, stored: int) -> float:
    """What a byte of a leaf, or of an inner node's snapshot, is worth: tokens to recompute without
    it, more if deep or used often, less with age. Age is counted in bytes stored since the last
    use, so many small side requests age a long chat less than another long chat does. `clock`: see
    `Totals`. `stored`: bytes in the prefix cache."""
    if not node.complete and node.snapshot is None:
        return 0.0  # no row can resume here
    recomputed = len(node.tokens) if node.complete else node.stop - resumable_before(node)
    evicted = node.snapshot if node.children and node.snapshot is not None else node
    cost = recomputed * (1 + node.stop / ATTENTION_DEPTH) / max(1, evicted.nbytes)
    disuse = (clock - node.used) / max(1, stored)
    return cost * (1 + min(node.hits, PROVEN)) / (FRESH + disuse)


def resumable_before(node: Node) -> int:
    """The end of the last node above this one that has a snapshot. 0: none has one."""
    above = node.parent
    while above is not None and above.snapshot is None:
        above = above.parent
    return 0 if above is None else above.stop
