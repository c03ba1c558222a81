"""Whether rows decode together and chunks share their passes: given up as it fails, tried again."""

from __future__ import annotations

import logging

from ...isolation import Isolation
from ...records import LoadedModel
from ..fixed_shapes import FixedShapes
from .batch_layout import Layout, make_layout
from .circuit_breaker import CircuitBreaker
from .decode_batch import DecodeBatch
from .fixed_rows import FixedLayout
from .mixed_batch import MixedBatches
from .row_groups import Joining

log = logging.getLogger(__name__)


class Batching:
    """The rows that decode, and how. Belongs to the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        layout: str,
        *,
        mixes: bool,
        fixed: FixedShapes | None,
        joining: Joining | None,
    ) -> None:
        """`layout`, `mixes`: what the probe found; `fixed`: what passes look like instead;
        `joining`: see `Groups`."""
        self._best = layout
        self._fixed = fixed
        self._joining = joining
        self.rows = DecodeBatch(model, self.layout(layout))
        self.mixed = MixedBatches(mixes and fixed is None)
        self._together = CircuitBreaker()
        """Of rows that decode together."""

    @property
    def drafts(self) -> bool:
        """Whether rows may take several tokens in a pass."""
        return self._together.closed and self.rows.layout.name == "grouped"

    @property
    def mixes(self) -> bool:
        """Whether chunks of prompts may share the pass of rows that decode."""
        return self._together.closed and self.mixed.allowed

    def layout(self, name: str) -> Layout:
        """A new one, of this name unless passes are fixed."""
        if self._fixed is not None:
            return FixedLayout(self._fixed.rows)
        return make_layout(name, self._joining)

    def passed(self, rows: int) -> None:
        """A pass of so many rows has not failed."""
        self.mixed.passed()
        if self._together.passed(used=rows > 1):
            self._go_together()

    def failed(self) -> None:
        """A pass has failed: prompts that took part start again, or rows decode alone."""
        if self.mixed.blame() or self._best == "solo" or self._fixed:
            return
        if self._together.failed():
            self._go_solo()

    def _go_solo(self) -> None:
        """Batching itself fails: rows decode one by one until it is tried again."""
        failures = self._together.failures
        log.error("decoding together failed %d times: rows decode alone now", failures)
        self._go_on_in("solo")

    def _go_together(self) -> None:
        """Batching is tried again; where rows cannot even be merged, they go on alone."""
        with Isolation() as tried:
            self._go_on_in(self._best)
        if tried.fault is None:
            log.info("rows decode together again, with layout %s", self._best)
        elif self._together.failed():
            log.warning("rows cannot decode together yet: %s", tried.fault.summary)

    def _go_on_in(self, name: str) -> None:
        """Let the rows go on in another layout."""
        layout = self.layout(name)
        for each in self.rows.layout.passes():
            for row in each.rows:
                layout.add(row, self.rows.extract(row))
        self.rows.layout = layout
