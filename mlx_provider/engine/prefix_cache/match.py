"""How much of a prompt is stored, and from where a row can resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from .key import Ids, outside_spans
from .segments import Segment
from .snapshots import Snapshot
from .tree import Node, Walk


@dataclass(frozen=True)
class Match:
    """The longest prefix a row can resume from, and why it is not longer."""

    length: int
    """Tokens that `restore` will put into the row's cache."""
    asked: int
    """Tokens of the whole prompt."""
    shared: int
    """Tokens in common with the closest stored path; more than `length` where state is missing."""
    branch: int
    """Tokens after which this prompt leaves another one; 0 where it does not."""
    diverged_at: int | None
    """First position that differs from that path; `None`: the path ended, or nothing differs."""
    stored_token: int | None
    """The id stored at `diverged_at`."""
    path: tuple[Node, ...] = ()
    """The nodes used, from the first token on."""
    stateful: Node | None = None
    """The node whose snapshot is used, where the match needs one."""
    version: int = 0
    """Of the store when this was found."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(cast("Segment", node.segment) for node in self.path)

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.stateful is None else cast("Snapshot", self.stateful.snapshot)


def resume(found: Walk, ids: Ids, version: int) -> Match:
    """The match for a prompt `ids` that follows the tree as `found` says."""
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
