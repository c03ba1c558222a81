"""The charged size of stored parts if processes keep different parts of a row.

Every process has the same tree, so that all resume at the same token and evict the same nodes. The
charge of a node is therefore its largest size in any process. A row can be cut or resumed only
where this is possible in every process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..heterogeneous import Heterogeneous
from .layer_kinds import Unstorable
from .segments import RowParts, row_parts
from .snapshots import Charge, Snapshot


def parts_over(
    cache: list[Any], length: int, *, beyond: bool, heterogeneous: Heterogeneous | None
) -> RowParts:
    """`row_parts` with the limits of all processes. `beyond`: the row holds more tokens.

    Raises `Unstorable` and `ValueError`. If one process raises `Unstorable`, all do.
    """
    row, error = None, None
    try:
        row = row_parts(cache, length)
        row = replace(row, exact=row.exact and not beyond)
    except (Unstorable, ValueError) as found:
        error = found
    if heterogeneous is not None:
        row = _over(row, heterogeneous)
    if error is not None:
        raise error
    if row is None:
        raise Unstorable("another process cannot keep its part of a row")
    return row


def _over(row: RowParts | None, heterogeneous: Heterogeneous) -> RowParts | None:
    sizes = (
        [0] * 4 if row is None else [*row.own_size(complete=False), *row.own_size(complete=True)]
    )
    cut = row is not None and row.complete, row is not None and row.exact
    failed, partial, moved, *most = heterogeneous.most(
        [row is None, not cut[0], not cut[1], *sizes]
    )
    if row is None or failed:
        return None
    counted = [int(each) for each in most]
    return replace(
        row,
        complete=not partial,
        exact=not moved,
        charges=(Charge(*counted[:2]), Charge(*counted[2:])),
    )


def snapshot_over(
    found: Snapshot | None, heterogeneous: Heterogeneous, *, failed: bool
) -> Snapshot | None:
    """This process's snapshot with the charge of all processes. `None`: a process failed to take
    one, or none needs one."""
    own = [failed, found is not None, *((found.nbytes, found.buffers) if found else (0, 0))]
    gone, wanted, nbytes, buffers = heterogeneous.most(own)
    if gone or not wanted:
        return None
    return replace(found or Snapshot.of({}), charge=Charge(int(nbytes), int(buffers)))
