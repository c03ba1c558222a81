"""The engine settings for `reproducible: true`, and their description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..engine.execution.deep_cache import Reserve
from ..engine.execution.exactness import exact_rows
from ..engine.execution.probe import Probe
from ..engine.fixed_shapes import FixedShapes
from ..engine.scheduling.scheduler import Limits
from ..protocol.health import FixedPasses
from ..records import LoadedModel
from .kv_choice import MakeCache


@dataclass(frozen=True)
class Reproducible:
    shapes: FixedShapes
    cost: float
    """Time of such a pass, as a multiple of a single-row pass."""
    note: str = ""

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        make_cache: MakeCache,
        found: Probe,
        limits: Limits,
        reserve: Reserve,
    ) -> Reproducible:
        """The passes with the most rows that give equal bits (engine thread). `reserve`: see
        `exact_rows`."""
        shapes = FixedShapes.within(limits.max_rows, limits.max_chunk)
        wanted = shapes.rows if found.layout == "grouped" else 1
        exact = exact_rows(model, make_cache, wanted, reserve)
        return cls(replace(shapes, rows=exact.rows), exact.cost, exact.note)

    def limits(self, limits: Limits) -> Limits:
        return replace(limits, max_chunk=self.shapes.tokens)

    def passing(
        self, passes: Callable[[int, int], int], state_bytes: int
    ) -> Callable[[int, int], int]:
        """Bytes of passes, padded with rows of `state_bytes` each."""
        rows = self.shapes.rows
        beside = (rows - 1) * state_bytes
        return lambda tokens, live: passes(tokens, max(rows, live)) + beside

    @property
    def summary(self) -> FixedPasses:
        return FixedPasses(rows=self.shapes.rows, tokens=self.shapes.tokens, cost=self.cost)
