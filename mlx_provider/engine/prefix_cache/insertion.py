"""How a stored path grows: from a live row, or from what was read back from disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Protocol

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

    def states(self, *, complete: bool) -> Mapping[int, Snapshot]:
        """Snapshots by token count; none are needed where segments are complete."""

    def bytes_beyond(self, start: int, stop: int, *, complete: bool) -> int:
        """Upper bound of what tokens `start .. stop` and the states will take."""

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

    @property
    def complete(self) -> bool:
        return self.row.complete

    @cached_property
    def _all_states(self) -> Mapping[int, Snapshot]:
        last = take_snapshot(self.cache) if self.row.exact else None
        return {**self.given, **({} if last is None else {self.row.length: last})}

    def states(self, *, complete: bool) -> Mapping[int, Snapshot]:
        return {} if complete else self._all_states

    def bytes_beyond(self, start: int, stop: int, *, complete: bool) -> int:
        tokens = (stop - start) * self.row.token_bytes(complete=complete)
        return tokens + sum(state.nbytes for state in self.states(complete=complete).values())

    def bounds(self) -> set[int]:
        return {self.prompted}

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        return self.row.cut(start, stop, complete=complete)


@dataclass(frozen=True)
class LoadedPath:
    """Segments read from disk, by their first position, and the state at the path's end."""

    parts: Mapping[int, Segment]
    complete: bool
    given: Mapping[int, Snapshot]
    prompted: float = inf

    def states(self, *, complete: bool) -> Mapping[int, Snapshot]:
        return {} if complete else self.given

    def bytes_beyond(self, start: int, stop: int, *, complete: bool) -> int:
        states = self.states(complete=complete).values()
        return sum(p.nbytes for p in self.parts.values()) + sum(s.nbytes for s in states)

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


def grow(root: Node, found: Walk, ids: Ids, source: Source) -> Node:
    """Add what `found` lacks of the path `ids`; its last node."""
    complete = grows_complete(found, source)
    parent = root
    if found.steps:
        node, agreed = found.steps[-1]
        if found.shared == len(ids) and complete:
            return node
        parent = node if agreed == len(node.tokens) else split(node, agreed)
    states = source.states(complete=complete)
    cuts = _cuts(found.shared, len(ids), source.bounds() | set(states))
    continued = int(2 * found.shared > len(ids))  # a conversation goes on: it may again
    for start, stop in pairwise(cuts):
        segment = source.cut(start, stop, complete=complete)
        parent = add(parent, ids[start:stop], segment, complete=complete)
        parent.hits, parent.generated = continued, start >= source.prompted
    for at, state in states.items():
        attach(parent, at, state)
    return parent


def _cuts(start: int, stop: int, wanted: set[int]) -> list[int]:
    if start == stop:
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
