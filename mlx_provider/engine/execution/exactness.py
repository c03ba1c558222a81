"""Checks at load that a row gives the same bits at every place of a full pass, with any other rows.

The rounding of the matrix products of a pass depends only on its shape, and the attention of each
row is separate. If kernels of the device treat places differently, or the model does not accept
rows with separate caches, each row of a reproducible model has its own pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import inf

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel
from ..request import Row
from . import solo_rows
from .deep_cache import Reserve, unlimited
from .fixed_rows import FixedLayout
from .probe import one_step, stand_in
from .probe_memory import NO_ROOM, has_room
from .solo_rows import STEPS, ByStep, MakeCache, SoloRow

KINDS = ((11, 0), (270, 9))
"""Prompt lengths of the tested rows, with their rotary deltas."""
LONGEST = KINDS[-1][0] + STEPS
"""Tokens of the longest of them at the end."""
ALONE = "each row decodes in a pass of its own"


@dataclass(frozen=True)
class Exact:
    """How the rows of a model must run to give the same bits in any batch."""

    rows: int
    """Rows of every pass."""
    cost: float = 1.0
    """Time of such a pass, as a multiple of a pass with a single row."""
    note: str = ""
    """Why there are fewer rows than requested."""


def exact_rows(
    model: LoadedModel, make_cache: MakeCache, wanted: int, reserve: Reserve = unlimited
) -> Exact:
    """`wanted` rows, or one. Runs on the engine thread. Never raises.

    `reserve`: if it returns `False` for the memory of the passes, none is run.
    """
    if wanted == 1:
        return Exact(1)
    with Isolation() as tried:
        if not has_room(model, make_cache, LONGEST, reserve):
            return Exact(1, note=f"{ALONE}: {NO_ROOM}")
        rows = [
            solo_rows.decoding(model, make_cache, solo_rows.some_tokens(model, *kind), kind[1])
            for kind in KINDS
        ]
        problem = _problem(model, rows, wanted)
        if problem:
            return Exact(1, note=f"{ALONE}: {problem}")
        single, filled = (_seconds(model, rows[0], size) for size in (1, wanted))
        return Exact(wanted, max(1.0, filled / single))
    return Exact(1, note=ALONE if tried.fault is None else f"{ALONE}: {tried.fault.summary}")


def _problem(model: LoadedModel, rows: Sequence[SoloRow], size: int) -> str:
    """Why rows must not share passes of this size. Empty: they may."""
    filled = [_run(model, [i], rows, size)[0] for i in range(len(rows))]
    wrong = next((p for row, own in zip(rows, filled, strict=True) if (p := row.problem(own))), "")
    if wrong:
        return wrong
    order = [i % len(rows) for i in range(size)]
    for several in (order, order[::-1]):
        found = _run(model, several, rows, size)
        for place, (i, own) in enumerate(zip(several, found, strict=True)):
            if not all(map(partial(mx.array_equal, equal_nan=True), filled[i], own)):
                return f"at place {place} of {size} its logits differ from those alone"
    return ""


def _run(
    model: LoadedModel, which: Sequence[int], rows: Sequence[SoloRow], size: int
) -> list[ByStep]:
    """Logits by step of some of the rows, in passes of `size`."""
    layout, found = FixedLayout(size), dict[Row, list[mx.array]]()
    for i in which:
        row = stand_in(rows[i].tokens, KINDS[i][1])
        layout.add(row, deepcopy(rows[i].cache))
        found[row] = []
    for _ in range(STEPS):
        one_step(model, layout, found)
    return list(found.values())


def _seconds(model: LoadedModel, one: SoloRow, size: int) -> float:
    """Seconds of the fastest pass of one row, padded to `size`."""
    layout, row, best = FixedLayout(size), stand_in(one.tokens, KINDS[0][1]), inf
    layout.add(row, deepcopy(one.cache))
    for _ in range(STEPS):
        began = time.perf_counter()
        one_step(model, layout, {row: []})
        best = min(best, time.perf_counter() - began)
    return best
