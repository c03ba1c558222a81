"""Reproducible models: how many rows may share a pass so that each gets the same bits as alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..engine.scheduling.chunking import FixedShapes
from ..engine.scheduling.ledger import Limits
from ..errors import wrong_option
from ..isolation import Fault, attempt
from ..protocol.health import FixedPasses
from ..records import LoadedModel
from . import solo_rows
from .probe import NO_ROOM, Probe, Reserve, Trial, has_room, unlimited
from .solo_rows import STEPS, ByStep, MakeCache, SoloRow

KINDS = ((11, 0), (270, 9))
"""Prompt lengths of the tested rows, with their rotary deltas."""
REPEATED = (256, 512, 535)
"""Ends of the passes of the prompt that is computed twice. Its last pass is short, and it decodes
beyond 512 places: with such shapes, one prompt gave two texts on an H100."""
ROWS_ALONE = "each row decodes in a pass of its own"
UNSTEADY = "set MLX_CUDA_USE_CUDNN_SDPA=0 for the engine on an NVIDIA GPU and load it again"


@dataclass(frozen=True)
class Reproducible:
    shapes: FixedShapes  # the only shapes in which passes of the model run
    note: str = ""  # why there are fewer rows than requested

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        make_cache: Callable[[], list[Any]],
        found: Probe,
        limits: Limits,
        reserve: Reserve,
    ) -> Reproducible:
        """The passes with the most rows that give equal bits (engine thread). `reserve`: see
        `exact_rows`. Raises `BadRequest` if the device gives different ones for one prompt."""
        shapes = FixedShapes.within(limits.max_rows, limits.max_chunk)
        # not by the layout that was faster: the bits would depend on the time of passes
        wanted = shapes.rows if found.layout == "grouped" or found.padded else 1
        exact = exact_rows(model, make_cache, wanted, reserve)
        if not exact.steady:
            why = "one prompt, computed twice alone, gives two results on this device"
            raise wrong_option("reproducible", f"{why}: leave it out, or {UNSTEADY}")
        return cls(replace(shapes, rows=exact.rows), exact.note)

    def passing(
        self, passes: Callable[[int, int], int], state_bytes: int
    ) -> Callable[[int, int], int]:
        """The bytes of passes by (prompt tokens, rows), as `passes` has them, if each is filled up
        with rows of `state_bytes`."""
        rows = self.shapes.rows
        beside = (rows - 1) * state_bytes
        return lambda tokens, live: passes(tokens, max(rows, live)) + beside

    @property
    def summary(self) -> FixedPasses:
        return FixedPasses(rows=self.shapes.rows, tokens=self.shapes.tokens)


@dataclass(frozen=True)
class Exact:
    rows: int  # rows of every pass
    note: str = ""  # why there are fewer rows than requested
    steady: bool = True  # whether one prompt, computed twice alone, gave the same bits


def exact_rows(
    model: LoadedModel, make_cache: MakeCache, wanted: int, reserve: Reserve = unlimited
) -> Exact:
    """`wanted` rows, or one, if kernels of the device treat places differently, or the model does
    not accept rows with separate caches. Runs on the engine thread. Never raises. `reserve`: if it
    returns `False` for the memory of the passes, none is run."""
    result = attempt(lambda: _exact_rows(model, make_cache, wanted, reserve))
    if isinstance(result, Exact):
        return result
    return Exact(1, note=f"{ROWS_ALONE}: {result.summary if isinstance(result, Fault) else result}")


def _exact_rows(
    model: LoadedModel, make_cache: MakeCache, wanted: int, reserve: Reserve
) -> Exact | str:
    """The rows that passes may have, or why rows must not share them."""
    if not has_room(model, make_cache, REPEATED[-1] + STEPS, reserve):
        return NO_ROOM
    ends = [n for n in REPEATED if n + STEPS <= model.info.context_length]
    tokens = solo_rows.some_tokens(model, ends[-1], 0) if ends else []
    twice = (solo_rows.in_chunks(model, make_cache(), tokens, ends) for _ in range(2))
    if not _equal(*twice):
        return Exact(1, steady=False)
    if wanted == 1:
        return Exact(1)
    decode = partial(solo_rows.decoding_row, model, make_cache)
    rows = [decode(solo_rows.some_tokens(model, *kind), kind[1]) for kind in KINDS]
    alone = [Trial(model, "fixed", [row], wanted).run(STEPS)[0] for row in rows]
    if problem := next(filter(None, map(SoloRow.problem, rows, alone)), ""):
        return problem
    order = [i % len(rows) for i in range(wanted)]
    for several in (order, order[::-1]):
        found = Trial(model, "fixed", [rows[i] for i in several], wanted).run(STEPS)
        for place, (i, logits) in enumerate(zip(several, found, strict=True)):
            if not _equal(alone[i], logits):
                return f"at place {place} of {wanted} its logits differ from those alone"
    return Exact(wanted)


def _equal(some: ByStep, others: ByStep) -> bool:
    return all(mx.array_equal(a, b, equal_nan=True) for a, b in zip(some, others, strict=True))
