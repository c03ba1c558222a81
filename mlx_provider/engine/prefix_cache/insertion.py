"""How a stored path grows: from a live row, or from what was read back from disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

from .key import Ids
from .segments import RowParts, Segment, take_snapshot
from .snapshots import Snapshot
from .tree import Node, Walk, add, split

MAX_EDGE = 2048
"""Tokens of one node: bounds what a split copies, and lets a long tail go piece by piece."""
RECENT = 3
"""Snapshots kept per path besides the first, which is the end of the system prompt."""
NEAR = 16
"""Tokens that are cheaper to compute again than to keep a state for."""


class Source(Protocol):
    """Where the part of a path comes from that is not stored yet."""

    @property
    def complete(self) -> bool:
        """Its segments hold every layer."""

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
        return set()

    def cut(self, start: int, stop: int, *, complete: bool) -> Segment:
        return self.row.cut(start, stop, complete=complete)


@dataclass(frozen=True)
class LoadedPath:
    """Segments read from disk, by their first position, and the state at the path's end."""

    parts: Mapping[int, Segment]
    complete: bool
    given: Mapping[int, Snapshot]

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


def grow(root: Node, found: Walk, ids: Ids, source: Source) -> tuple[Node, int]:
    """Add what `found` lacks of the path `ids`; its last node, and the bytes added."""
    complete = grows_complete(found, source)
    parent = root
    if found.steps:
        node, agreed = found.steps[-1]
        if found.shared == len(ids) and complete:
            return node, 0
        parent = node if agreed == len(node.tokens) else split(node, agreed)
    states = source.states(complete=complete)
    cuts = _cuts(found.shared, len(ids), source.bounds() | set(states))
    added = 0
    continued = int(2 * found.shared > len(ids))  # a conversation goes on: it may again
    for start, stop in pairwise(cuts):
        segment = source.cut(start, stop, complete=complete)
        parent = add(parent, ids[start:stop], segment, complete=complete)
        parent.hits = continued
        added += parent.nbytes
    return parent, added + sum(_attach(parent, at, state) for at, state in states.items())


def _cuts(start: int, stop: int, wanted: set[int]) -> list[int]:
    if start == stop:
        return []
    edges = set(range(-(-start // MAX_EDGE) * MAX_EDGE, stop, MAX_EDGE))
    return sorted({at for at in wanted | edges if start < at < stop} | {start, stop})


def _attach(leaf: Node, at: int, state: Snapshot) -> int:
    """Put a state at token `at` of the path to `leaf`; the bytes added."""
    node = next((node for node in leaf.path() if node.start < at <= node.stop), None)
    if node is None or node.complete:
        return 0
    if at < node.stop:
        node = split(node, at - node.start)
    if node.snapshot is not None:
        return 0
    node.snapshot = state
    return state.nbytes


def prune(leaf: Node) -> list[tuple[int, int]]:
    """Drop snapshots of a path but its first and its last; (position, bytes) of each.

    One that stands close behind another spares next to nothing (the end of the prompt, right
    after the end of the last message), so it goes too once the path leads on.
    """
    holders = [node for node in leaf.path() if node.snapshot is not None]
    spaced = holders[:1]
    for node in holders[1:]:
        if node.stop - spaced[-1].stop >= NEAR or node is holders[-1]:
            spaced.append(node)
    kept = {*spaced[:1], *spaced[1:][-RECENT:]}
    gone = []
    for node in holders:
        if node.snapshot is not None and node not in kept:
            gone.append((node.stop, node.snapshot.nbytes))
            node.snapshot = None
    return gone
