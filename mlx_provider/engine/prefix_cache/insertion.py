"""How a stored path grows: from a live row, or from what was read back from disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Protocol

from .fitting import Fit
from .key import Ids
from .placement import INSIDE, RECENT
from .segments import RowParts, Segment
from .snapshots import Snapshot, take_snapshot
from .tree import Node, Walk, add, set_snapshot, split

MAX_EDGE = 2048
"""Tokens of one node: bounds what a split copies, and lets a long tail go piece by piece."""
NEAR = 16
"""Tokens that are cheaper to compute again than to keep a state for."""


class Source(Protocol):
    """Where the part of a path comes from that is not stored yet."""

    @property
    def complete(self) -> bool:
        """Its segments hold every layer."""

    @property
    def prompted(self) -> float:
        """Tokens before a reply, as far as is known."""

    @property
    def states(self) -> Mapping[int, Snapshot]:
        """Snapshots by token count, for paths of which not every layer can be cut."""

    @property
    def spare(self) -> Mapping[int, Snapshot]:
        """Further ones, to end a path that is kept in part."""

    def token_bytes(self, *, complete: bool) -> int:
        """Upper bound of the bytes of one token."""

    def bounds(self) -> set[int]:
        """Positions that no segment may span."""

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        """Tokens `start .. stop`."""


@dataclass(frozen=True)
class LivePath:
    """A row cache and the snapshots taken while it grew."""

    row: RowParts
    cache: list[Any]
    given: Mapping[int, Snapshot]
    prompted: int
    """Tokens before the reply."""
    spare: Mapping[int, Snapshot] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.row.complete

    @cached_property
    def states(self) -> Mapping[int, Snapshot]:
        last = take_snapshot(self.cache) if self.row.exact else None
        return {**self.given, **({} if last is None else {self.row.length: last})}

    def token_bytes(self, *, complete: bool) -> int:
        return self.row.token_bytes(complete=complete)

    def bounds(self) -> set[int]:
        return {self.prompted}

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        return self.row.cut(start, stop, complete=complete)


@dataclass(frozen=True)
class LoadedPath:
    """Segments read from disk, by their first position, and the state at the path's end."""

    parts: Mapping[int, Segment]
    complete: bool
    states: Mapping[int, Snapshot]
    prompted: float = inf
    spare: Mapping[int, Snapshot] = field(default_factory=dict)

    def token_bytes(self, *, complete: bool) -> int:
        return max((-(-part.nbytes // part.length) for part in self.parts.values()), default=0)

    def bounds(self) -> set[int]:
        return set(self.parts)

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        first, part = max((at, p) for at, p in self.parts.items() if at <= start)
        if stop - start == part.length:
            return part
        return part.slice(start - first, stop - first)


def grows_complete(found: Walk, source: Source) -> bool:
    """Whether nodes added to this path will hold every layer."""
    return source.complete and all(node.complete for node, _ in found.steps)


def shared_path(found: Walk, length: int, *, complete: bool) -> list[Node]:
    """The stored nodes of a path of `length` tokens; the last is split where the path leaves it."""
    path = [node for node, _ in found.steps]
    agreed = found.steps[-1][1] if path else 0
    if path and agreed < len(path[-1].tokens) and not (complete and found.shared == length):
        path[-1] = split(path[-1], agreed)
    return path


def cut_back(path: Sequence[Node], kept: Fit, length: int) -> list[Node]:
    """The nodes of a stored path that are kept, without the snapshots that are not.

    `length`: tokens of the whole path. A shorter head ends in a snapshot that is no guess.
    """
    nodes = [node for node in path if node.start < kept.stop]
    if nodes and kept.stop < nodes[-1].stop and kept.stop < length:
        nodes[-1] = split(nodes[-1], kept.stop - nodes[-1].start)
    for node in nodes:
        if node.snapshot is not None and node.stop not in kept.states:
            set_snapshot(node, None)
    if nodes and nodes[-1].guessed and kept.stop < length:
        nodes[-1].resumed = 1
    return nodes


def grow(parent: Node, ids: Ids, source: Source, kept: Fit, *, complete: bool, shared: int) -> Node:
    """Add below `parent` what is missing of a path's head; its last node."""
    every = {} if complete else source.states
    states = {at: every[at] for at in kept.states if at in every}
    spare = {at: source.spare[at] for at in kept.states - {*states} if at in source.spare}
    states |= {at: replace(state, inside=False) for at, state in spare.items()}
    cuts = _cuts(parent.stop, kept.stop, source.bounds() | set(states))
    continued = int(2 * shared > len(ids))  # a conversation goes on: it may again
    for start, stop in pairwise(cuts):
        segment = source.cut(start, stop, complete=complete)
        parent = add(parent, ids[start:stop], segment, complete=complete)
        parent.hits, parent.generated = continued, start >= source.prompted
    for at, state in states.items():
        attach(parent, at, state)
    return parent


def _cuts(start: int, stop: int, wanted: set[int]) -> list[int]:
    if start >= stop:
        return []
    edges = set(range(-(-start // MAX_EDGE) * MAX_EDGE, stop, MAX_EDGE))
    return sorted({at for at in wanted | edges if start < at < stop} | {start, stop})


def attach(leaf: Node, at: int, state: Snapshot, *, wanted: bool = False) -> Node | None:
    """Put a state at token `at` of the path to `leaf`; the node that has it, if it had none.

    `wanted`: those tokens were stored already, so a row would have resumed there.
    """
    node = next((node for node in leaf.path() if node.start < at <= node.stop), None)
    if node is None or node.complete:
        return None
    if at < node.stop:
        node = split(node, at - node.start)
    if node.snapshot is not None:
        return None
    set_snapshot(node, state)
    node.resumed = int(wanted)
    return node


def prune(leaf: Node) -> list[int]:
    """Drop snapshots of a path but `1 + RECENT + INSIDE`; the positions of those dropped.

    Stay those at the ends of its first message and of its last ones, and of those inside messages
    the most resumed, the last first.
    """
    holders = [node for node in leaf.path() if node.snapshot is not None]
    ends = _spaced([node for node in holders if not _inside(node)])
    kept = {*ends[:1], *ends[1:][-RECENT:]}
    others = sorted(filter(_inside, holders), key=lambda node: (node.resumed, node.stop))
    kept |= {*others[-INSIDE:]}
    gone = [node for node in holders if node not in kept]
    for node in gone:
        set_snapshot(node, None)
    return [node.stop for node in gone]


def _spaced(holders: list[Node]) -> list[Node]:
    """Without those that spare next to nothing, but for the last.

    The end of the prompt stands right after the end of the last message, so it goes once the
    path leads on.
    """
    spaced = holders[:1]
    for node in holders[1:]:
        if node.stop - spaced[-1].stop >= NEAR or node is holders[-1]:
            spaced.append(node)
    return spaced


def _inside(holder: Node) -> bool:
    return holder.snapshot is not None and holder.snapshot.inside
