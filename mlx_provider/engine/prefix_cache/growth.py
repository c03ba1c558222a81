"""How a stored path grows from a row: nodes are cut, added and joined with snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from .buffers import RowBuffers
from .segments import ArrayPack, RowParts, Snapshot
from .tree import INSIDE, NEAR, RECENT, Ids, Match, Node, segment_of, split

MAX_EDGE = 2048
"""Most tokens of a node: limits the copy of a split, and lets a long tail be evicted in pieces."""


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


def prune(leaf: Node) -> None:
    """Keep at most `1 + RECENT + INSIDE` snapshots of a path: the ends of the first and the
    last messages; inside messages the most resumed, then the last ones."""
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


def copy_out(buffers: RowBuffers, held: Sequence[Node]) -> None:
    """Copy the tokens of these nodes out of a row's buffers, layer by layer."""
    spans = [(node.start, node.stop) for node in held]
    layers = segment_of(held[0]).layers
    copies = [buffers.pieces(leaf, spans) for leaf, count in layers if count]
    for i, node in enumerate(held):
        pack = ArrayPack.loose([array for leaf in copies for array in leaf[i]])
        node.segment = replace(segment_of(node), pack=pack, held=None, start=0, slack=0)
