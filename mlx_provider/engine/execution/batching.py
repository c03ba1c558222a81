"""Decides whether rows share passes, and whether chunks share the passes of rows. Both stop after
failures and are tried again later."""

from __future__ import annotations

import logging

from ...isolation import Isolation
from ...records import LoadedModel
from ..fixed_shapes import FixedShapes
from .batch_layout import Layout, make_layout
from .decode_batch import DecodeBatch
from .fixed_rows import FixedLayout
from .mixed_chunk import CircuitBreaker, MixedBatches

log = logging.getLogger(__name__)


class Batching:
    """The batch of decoding rows and its layout. Belongs to the engine thread."""

    def __init__(
        self,
        model: LoadedModel,
        layout: str,
        *,
        mixes: bool,
        fixed: FixedShapes | None,
    ) -> None:
        """`layout`, `mixes`: results of the probe. `fixed`: fixed pass shapes, in place of those
        results."""
        self._best = layout
        self._fixed = fixed
        self.rows = DecodeBatch(model, self.layout(layout))
        self.mixed = MixedBatches(mixes and fixed is None)
        self._together = CircuitBreaker()
        """For passes with several rows."""

    @property
    def drafts(self) -> bool:
        """Whether rows may have several tokens in one pass."""
        return self._together.closed and self.rows.layout.name == "grouped"

    @property
    def mixes(self) -> bool:
        """Whether a prompt chunk may share a pass with the rows that decode."""
        return self._together.closed and self.mixed.allowed

    def layout(self, name: str) -> Layout:
        """A new layout of this name, or the fixed layout if passes are fixed."""
        if self._fixed is not None:
            return FixedLayout(self._fixed.rows)
        return make_layout(name)

    def passed(self, rows: int) -> None:
        """Count a pass of this many rows that did not fail."""
        self.mixed.passed()
        if self._together.passed(used=rows > 1):
            self._go_together()

    def failed(self) -> None:
        """A pass failed. Prompts in it start again; without any, rows may have to decode alone."""
        if self.mixed.blame() or self._best == "solo" or self._fixed:
            return
        if self._together.failed():
            self._go_solo()

    def _go_solo(self) -> None:
        """Decode each row alone until batching is tried again."""
        failures = self._together.failures
        log.error("batched decoding failed %d times: rows decode alone now", failures)
        self._go_on_in("solo")

    def _go_together(self) -> None:
        """Try batching again. If the rows cannot be merged, they stay alone."""
        with Isolation() as tried:
            self._go_on_in(self._best)
        if tried.fault is None:
            log.info("rows decode together again, with layout %s", self._best)
        elif self._together.failed():
            log.warning("rows cannot decode together yet: %s", tried.fault.summary)

    def _go_on_in(self, name: str) -> None:
        """Move the rows to another layout."""
        layout = self.layout(name)
        for each in self.rows.layout.passes():
            for row in each.rows:
                layout.add(row, self.rows.extract(row))
        self.rows.layout = layout
