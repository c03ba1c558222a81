"""The stored part of a prompt, and the position at which a row can resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from .key import Ids, outside_spans
from .segments import Segment
from .snapshots import Snapshot
from .tree import Node, Walk


@dataclass(frozen=True)
class Match:
    length: int
    asked: int
    shared: int
    """Tokens in common with the closest stored path. More than `length` if a state is missing."""
    branch: int
    """Tokens before the point where this prompt leaves another one. 0: it leaves none."""
    diverged_at: int | None
    """First position that differs from that path, if any."""
    stored_token: int | None
    path: tuple[Node, ...] = ()
    stateful: Node | None = None
    version: int = 0
    counted: bool = True
    """Whether a client has asked for the prompt, so that it counts as a look-up."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(cast("Segment", node.segment) for node in self.path)

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.stateful is None else cast("Snapshot", self.stateful.snapshot)


def resume(found: Walk, ids: Ids, version: int) -> Match:
    usable = outside_spans(ids, found.shared)
    length, stateful = 0, None
    for node, agreed in found.steps:
        if node.complete:
            length, stateful = min(usable, node.start + agreed), None
        elif (
            node.snapshot is not None
            and agreed == len(node.tokens)
            and node.stop == outside_spans(ids, node.stop) <= usable
        ):
            length, stateful = node.stop, node
    return Match(
        length,
        len(ids),
        found.shared,
        found.branch,
        found.diverged_at,
        found.stored_token,
        tuple(node for node, _ in found.steps if node.start < length),
        stateful,
        version,
    )
