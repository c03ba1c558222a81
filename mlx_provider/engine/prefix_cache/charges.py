"""What stored parts count for, where ranks keep unlike parts of a row.

Every rank has the same tree, so that all resume at the same token and forget the same nodes. What
a node counts for is then not its own bytes but the most on any rank, and a row can be cut, or
resumed from, where it can on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from .layer_kinds import Kind, Unstorable
from .segments import RowParts, row_parts
from .snapshots import Charge, Snapshot


class Among(Protocol):
    """The ranks."""

    @property
    def kind(self) -> Kind:
        """What the layers of all of them allow at most."""

    def most(self, own: Sequence[float]) -> list[float]:
        """The largest on any rank, one by one. Every rank asks at the same place."""


def parts_over(cache: list[Any], length: int, *, beyond: bool, among: Among | None) -> RowParts:
    """`row_parts`, `beyond`: of a row that holds more, `among`: as all ranks can keep it.

    Raises `Unstorable` and `ValueError`, the former on every rank where one cannot.
    """
    row, error = None, None
    try:
        row = row_parts(cache, length)
        row = replace(row, exact=row.exact and not beyond)
    except (Unstorable, ValueError) as found:
        error = found
    if among is not None:
        row = _over(row, among)
    if error is not None:
        raise error
    if row is None:
        raise Unstorable("another rank cannot keep its part of a row")
    return row


def _over(row: RowParts | None, among: Among) -> RowParts | None:
    sizes = (
        [0] * 4 if row is None else [*row.own_size(complete=False), *row.own_size(complete=True)]
    )
    cut = row is not None and row.complete, row is not None and row.exact
    failed, partial, moved, *most = among.most([row is None, not cut[0], not cut[1], *sizes])
    if row is None or failed:
        return None
    counted = [int(each) for each in most]
    return replace(
        row,
        complete=not partial,
        exact=not moved,
        charges=(Charge(*counted[:2]), Charge(*counted[2:])),
    )


def snapshot_over(found: Snapshot | None, among: Among, *, failed: bool) -> Snapshot | None:
    """What this rank has taken, if anything, as all ranks have it; `None`: one of them could not,
    or none has to."""
    own = [failed, found is not None, *((found.nbytes, found.buffers) if found else (0, 0))]
    gone, wanted, nbytes, buffers = among.most(own)
    if gone or not wanted:
        return None
    return replace(found or Snapshot.of({}), charge=Charge(int(nbytes), int(buffers)))
