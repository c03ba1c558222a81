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
    own = [1] + [0] * 8 if row is None else _needs(row)
    failed, partial, moved, windows, *most = heterogeneous.most(own)
    if row is None or failed:
        return None
    each, packs, complete, complete_packs, arrays = (int(value) for value in most)
    return replace(
        row,
        complete=not partial,
        exact=not moved,
        windows=bool(windows),
        charges=(
            Charge(each, packs),
            Charge(complete, complete_packs),
            Charge(each, arrays),
        ),
    )


def _needs(row: RowParts) -> list[int]:
    """What `_over` compares."""
    return [
        False,
        not row.complete,
        not row.exact,
        row.windows,
        *row.own_size(complete=False),
        *row.own_size(complete=True),
        row.arrays,
    ]


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
