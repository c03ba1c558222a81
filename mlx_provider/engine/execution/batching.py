"""Decides whether rows share passes, and whether chunks share the passes of rows. A feature that
keeps failing is disabled, and tried again after growing waits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...isolation import Isolation
from ...records import LoadedModel
from ..request import PrefillJob
from ..scheduling.chunking import Chunk
from ..sizes import FixedShapes
from .batch_layout import Layout
from .decode_batch import DecodeBatch
from .grouped_kv import MixedChunk

log = logging.getLogger(__name__)

TOLERATED = 1
"""Failures after which the feature is still used."""
FIRST_WAIT = 256
"""Steps without failure after which the feature is tried again, or its failures are forgotten."""
LONGEST_WAIT = 2**16
"""About twenty minutes at fifty steps per second."""


class CircuitBreaker:
    def __init__(self) -> None:
        self.closed = True
        """The feature is in use."""
        self.failures = 0
        self._quiet = 0
        self._wait = FIRST_WAIT

    def failed(self) -> bool:
        """Count a failure of the feature or of its fallback. Returns whether this failure disables
        it."""
        self._quiet = 0
        if not self.closed:
            return False
        self.failures += 1
        self.closed = self.failures <= TOLERATED
        return not self.closed

    def passed(self, *, used: bool) -> bool:
        """Count a step without failure. Returns whether the feature is enabled again. `used`: the
        step used the feature. The first failure of a trial ends it and doubles the next wait,
        unless as many steps succeeded before."""
        if self.closed and not used:
            return False
        self._quiet += 1
        if self._quiet < self._wait:
            return False
        self._quiet = 0
        if self.closed:
            self.failures, self._wait = 0, FIRST_WAIT
            return False
        self.closed, self.failures = True, TOLERATED
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True


class MixedBatches:
    """Chunks in the passes of rows that decode."""

    def __init__(self, possible: bool) -> None:
        """`possible`: result of the probe."""
        self._possible = possible
        self._breaker = CircuitBreaker()
        self._passes = 0
        self._jobs: list[tuple[int, PrefillJob, bool]] = []
        """Jobs with chunks in the last pass and in this one (`True`), and in passes of their own
        behind them without waiting, with the number of the pass. An error of any may show now."""

    @property
    def allowed(self) -> bool:
        return self._possible and self._breaker.closed

    def take_along(self, chunk: Chunk | None) -> MixedChunk | None:
        self._passes += 1
        self._jobs = [each for each in self._jobs if each[0] >= self._passes - 1]
        if chunk is None:
            return None
        self._jobs.append((self._passes, chunk.job, True))
        return mixed_chunk(chunk)

    def ran_apart(self, job: PrefillJob) -> None:
        self._jobs.append((self._passes + 1, job, False))

    def blame(self) -> bool:
        """Restart the prompts in a failed pass. Returns whether any prompt was in it."""
        for _, job, _ in self._jobs:
            job.restart()
        mixed = any(mixed for _, _, mixed in self._jobs)
        self._jobs = []
        if mixed and self._breaker.failed():
            log.error(
                "mixed passes failed %d times: chunks run in passes of their own now",
                self._breaker.failures,
            )
        return mixed

    def passed(self) -> None:
        used = any(at == self._passes and mixed for at, _, mixed in self._jobs)
        if self._breaker.passed(used=used):
            log.info("chunks share the passes of rows that decode again")


def mixed_chunk(chunk: Chunk) -> MixedChunk:
    job, start, stop = chunk.job, chunk.start, chunk.stop
    positions: Sequence[int] = range(start, stop)
    if job.places is not None:
        positions = job.places[start:stop]
    elif job.prompt.positions is not None:
        positions = job.prompt.positions[0, start:stop].tolist()
    return MixedChunk(
        job.tokens[start:stop],
        positions,
        job.held(),
        ends_prompt=stop == len(job.tokens),
        sparse=job.places is not None,
    )


class Batching:
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
        return self._together.closed and self.rows.layout.one_pass

    @property
    def mixes(self) -> bool:
        return self._together.closed and self.mixed.allowed

    def layout(self, name: str) -> Layout:
        """A new layout of this name, or the fixed layout if passes are fixed."""
        if self._fixed is not None:
            return Layout("fixed", self._fixed.rows)
        return Layout(name)

    def passed(self, rows: int) -> None:
        self.mixed.passed()
        if self._together.passed(used=rows > 1):
            self._go_together()

    def failed(self) -> None:
        """A pass failed. Prompts in it start again; without any, rows may have to decode alone."""
        if self.mixed.blame() or self._best == "solo" or self._fixed:
            return
        if self._together.failed():
            log.error(
                "batched decoding failed %d times: rows decode alone now", self._together.failures
            )
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
        layout = self.layout(name)
        for each in self.rows.layout.passes():
            for row in each.rows:
                layout.add(row, self.rows.extract(row))
        self.rows.layout = layout
