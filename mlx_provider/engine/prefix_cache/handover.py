"""Lets nodes refer to a row's buffers in place of copies, and counts what all nodes hold.

The tokens of a row. All positions count from its first token, also once a part of it is a prefix.
Doubled tokens are in the row's buffers, and in nodes that refer to other buffers:

    0          base_tokens    in_place.start        stop           offset         capacity
    |  in `base`    |    doubled    |  in `nodes`    |  charged to  |  spare, counts |
    |               |               |                |  the row     |  once idle     |
                    |<---- `stored`, in bytes ------>|
                    |<------------------ the arrays of `layers` -------------------->|

The fields of `RowBuffers` in each state, and the call that ends it:

| buffers of  | `users`        | `intact` | `nodes`        | `base`   | until                      |
|-------------|----------------|----------|----------------|----------|----------------------------|
| running row | its lease      | no       | after `insert` | optional | `release`: idle; else lost |
| idle entry  | none or claims | yes      | some           | optional | `fill_in_place`: row again |
| prefix      | leases of rows | yes      | optional       | none     | no row and no node has it  |
| lost row    | none           | no       | some           | optional | `Totals.remove_lost`       |

The lease of a running row that goes without `release` means a failed pass, which may also show
later (`lose_unread`); a claim just goes.
`tests/support/integrity.py` checks this after each step. Imports no mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .tree import NewPath, Node, remove, segment_of

if TYPE_CHECKING:
    from .buffers import Lease, RowBuffers
    from .segments import Segment

DOUBLED_SHARE = 4
"""At most this fraction (1/n) of a row is doubled."""


@dataclass(eq=False)
class Totals:
    """What all nodes of a prefix cache hold. Any thread may read the numbers."""

    max_buffers: int
    buffers: int = 0  # number of device buffers of the nodes
    node_bytes: int = 0
    spare_bytes: int = 0
    version: int = 0  # number of changes of nodes: each makes earlier matches invalid
    clock: int = 0  # bytes stored so far, plus one per use: the time by which nodes age
    rows: dict[RowBuffers, int] = field(default_factory=dict)
    """Buffers of rows to which nodes refer, each with the bytes of its spare capacity that count:
    0 while a row uses it. `spare_bytes` is their sum."""

    @property
    def nbytes(self) -> int:
        return self.node_bytes + self.spare_bytes

    def is_within(self, limit: float) -> bool:
        return self.nbytes <= limit and self.buffers <= self.max_buffers

    def count_node(self, node: Node, old: Segment | None) -> None:
        """Update `rows`, and what they store, once a node has another segment in place of `old`."""
        new, before = node.segment, None if old is None else old.row
        if old is not None and before is not None:
            before.stored -= old.kv_bytes
        if new is not None and new.row is not None:
            new.row.stored += new.kv_bytes
            new.row.nodes.add(node)
            self.rows.setdefault(new.row, 0)
        if before is not None and before is not node.row:
            before.nodes.discard(node)
            if not before.nodes:
                self.spare_bytes -= self.rows.pop(before)

    def release(self, lease: Lease, budget: Callable[[], int], *, merged: bool = False) -> None:
        """A row ends or is merged, and none of its passes has failed. If nodes are in its buffers,
        their spare capacity counts, and spare capacity is freed until all fits `budget()`. A prefix
        that no other row uses is cut to what nodes store, but not while a merged row reads it."""
        row, base = lease.row, lease.base
        lease.row, lease.capacity = None, 0
        if not merged and base is not None and base.users == [lease] and base.nodes:
            self.trim(base)
        if row is not None:
            row.intact = True
        if row is not None and row.nodes:
            self.set_spare(row, row.spare(row.path[-1].stop))
            self.trim_spare(budget())

    def remove_lost(self) -> None:
        """Remove nodes in lost buffers, with all below. One of which a child has a copy stays."""
        for row in [row for row in self.rows if row.lost]:
            for node in reversed(row.path):  # children first
                if not inherit(node):
                    remove(node)

    def trim_spare(self, limit: float) -> None:
        """Free spare capacity, the least recently used first, until `nbytes` is within `limit`."""
        for row in sorted(self.rows, key=lambda row: row.path[-1].used):
            if self.rows[row] and self.nbytes > limit:
                self.trim(row)

    def trim(self, row: RowBuffers) -> None:
        """Free a row's capacity after its last node."""
        stop = row.path[-1].stop
        self.set_spare(row, row.spare(stop))  # counts until it is free
        row.trim(stop)
        self.set_spare(row, row.spare(stop))

    def set_spare(self, row: RowBuffers, nbytes: int) -> None:
        """Count these bytes as the spare capacity of a row, if nodes are in its buffers."""
        if row in self.rows:
            self.spare_bytes += nbytes - self.rows[row]
            self.rows[row] = nbytes


def budget_after(row: RowBuffers, new: NewPath, budget: Callable[[], int]) -> int:
    """`budget()` as if nodes stored all tokens of a row, so that the row is charged for none."""
    before, own_tokens = row.stored, len(new.ids) - row.base_tokens
    row.stored = max(before, own_tokens * new.kv.token_bytes)
    try:
        return budget()
    finally:
        row.stored = before


def leave_in_place(row: RowBuffers, new: NewPath, path: Sequence[Node]) -> NewPath:
    """Returns `new` with `in_place`: nodes will refer to the row's buffers from token `start` on.
    Nodes in buffers of other rows stay there, so `start` is their end, and what the row has before
    it is doubled. Returns `new` unchanged if that is not possible. `path`: its stored nodes."""
    length, base_tokens = len(new.ids), row.base_tokens
    # a node in no row has a copy, which `add_nodes` drops
    ends = [x.stop for x in path if x.start >= base_tokens and x.row not in (None, row)]
    start = max(ends, default=base_tokens)
    doubled = start - base_tokens
    # without a prefix, both are `None`; if no node is in its prefix, only `stored_base` is
    stored_base = next((node.row for node in path if node.stop == base_tokens), None)
    is_possible = (
        stored_base is row.base
        and DOUBLED_SHARE * doubled <= length - base_tokens
        and all(node.start >= start for node in row.nodes)  # no node of others is between them
        and all(node.stop <= length for node in path)  # else the row lacks the end of the last one
    )
    if not is_possible:
        return new
    part = replace(new.kv, length=length - start, arrays={}, row=row)
    part = replace(part, start=start, doubled_tokens=doubled)
    # the nodes that the row has already count what is doubled
    doubled_bytes = 0 if row.nodes else doubled * part.token_bytes
    return replace(new, in_place=part, doubled_bytes=doubled_bytes)


def inherit(node: Node) -> bool:
    """Let a node refer to the buffers of a child that have its tokens, too (`doubled_tokens`).
    Returns `False` if there is no such child."""
    children = (child for child in node.children.values() if not child.lost)
    heir = next((child for child in children if segment_of(child).doubled_tokens), None)
    if heir is not None:
        segment, tokens = segment_of(heir), len(node.tokens)
        heir.set_payload(replace(segment, doubled_tokens=0), heir.snapshot)
        doubled = segment.doubled_tokens - tokens
        moved = replace(segment, length=tokens, start=node.start, doubled_tokens=doubled)
        node.set_payload(moved, node.snapshot)
    return heir is not None
