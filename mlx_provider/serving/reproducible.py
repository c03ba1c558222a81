"""What `reproducible: true` makes of a model's engine, and what of it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..engine.execution.exactness import exact_rows
from ..engine.execution.probe import Probe
from ..engine.fixed_shapes import FixedShapes
from ..engine.scheduling.scheduler import Limits
from ..protocol.health import FixedPasses
from ..records import LoadedModel
from .kv_choice import MakeCache


@dataclass(frozen=True)
class Reproducible:
    """One engine's passes."""

    shapes: FixedShapes
    cost: float
    """Times that a row alone waits as long as it would in passes of its own."""
    note: str = ""
    """Why rows do not share passes."""

    @classmethod
    def of(
        cls, model: LoadedModel, make_cache: MakeCache, found: Probe, limits: Limits
    ) -> Reproducible:
        """As many rows to a pass as give equal bits there (engine thread)."""
        shapes = FixedShapes.within(limits.max_rows, limits.max_chunk)
        exact = exact_rows(model, make_cache, shapes.rows if found.layout == "grouped" else 1)
        return cls(replace(shapes, rows=exact.rows), exact.cost, exact.note)

    def limits(self, limits: Limits) -> Limits:
        """With no longer chunks than there are."""
        return replace(limits, max_chunk=self.shapes.tokens)

    def passing(
        self, passes: Callable[[int, int], int], state_bytes: int
    ) -> Callable[[int, int], int]:
        """Bytes of passes, which are filled up with rows of `state_bytes` each."""
        rows = self.shapes.rows
        beside = (rows - 1) * state_bytes
        return lambda tokens, live: passes(tokens, max(rows, live)) + beside

    @property
    def told(self) -> FixedPasses:
        """For people."""
        return FixedPasses(rows=self.shapes.rows, tokens=self.shapes.tokens, cost=self.cost)
