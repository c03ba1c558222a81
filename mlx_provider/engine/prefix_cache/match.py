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
    """The longest prefix from which a row can resume, and why it is not longer."""

    length: int
    """Tokens that `restore` puts into the row's cache."""
    asked: int
    """Tokens of the whole prompt."""
    shared: int
    """Tokens in common with the closest stored path. More than `length` if a state is missing."""
    branch: int
    """Tokens before the point where this prompt leaves another one. 0: it leaves none."""
    diverged_at: int | None
    """First position that differs from that path. `None`: the path ended, or nothing differs."""
    stored_token: int | None
    """The id stored at `diverged_at`."""
    path: tuple[Node, ...] = ()
    """The used nodes, from the first token on."""
    stateful: Node | None = None
    """The node whose snapshot is used, if the match needs one."""
    version: int = 0
    """Version of the store at the time of the match."""
    counted: bool = True
    """Whether a client has asked for the prompt, so that its use counts as a look-up."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(cast("Segment", node.segment) for node in self.path)

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.stateful is None else cast("Snapshot", self.stateful.snapshot)


def resume(found: Walk, ids: Ids, version: int) -> Match:
    """The match for a prompt `ids`, from its walk through the tree."""
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
