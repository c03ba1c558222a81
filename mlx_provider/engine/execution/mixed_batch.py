"""Whether chunks run in their own forward pass or mixed into the decode batch."""

from __future__ import annotations

import logging

from ..request import PrefillJob
from ..scheduling.plan import Chunk
from .circuit_breaker import CircuitBreaker
from .piggyback import PiggybackedChunk

log = logging.getLogger(__name__)


class MixedBatches:
    """Belongs to the engine thread."""

    def __init__(self, possible: bool) -> None:
        """`possible`: what the probe found."""
        self._possible = possible
        self._breaker = CircuitBreaker()
        self._recent: list[PrefillJob | None] = []
        """Whose chunks were in the last pass and in this one: an error of either may show now."""

    @property
    def allowed(self) -> bool:
        """Whether the next pass may take a chunk along."""
        return self._possible and self._breaker.closed

    def take_along(self, chunk: Chunk | None) -> PiggybackedChunk | None:
        """What the next pass computes beside its rows."""
        self._recent = [*self._recent[-1:], None if chunk is None else chunk.job]
        if chunk is None:
            return None
        job = chunk.job
        positions = job.prompt.positions
        at = range(chunk.start, chunk.stop)
        return PiggybackedChunk(
            job.tokens[chunk.start : chunk.stop],
            at if positions is None else positions[0, chunk.start : chunk.stop].tolist(),
            job.held(),
            ends_prompt=chunk.stop == len(job.tokens),
        )

    def blame(self) -> bool:
        """A pass has failed: prompts that took part start again. Whether any did."""
        jobs = [job for job in self._recent if job is not None]
        self._recent = []
        for job in jobs:
            job.restart()
        if jobs and self._breaker.failed():
            log.error(
                "mixed passes failed %d times: chunks run in passes of their own now",
                self._breaker.failures,
            )
        return bool(jobs)

    def passed(self) -> None:
        """The last pass has not failed."""
        used = any(job is not None for job in self._recent[-1:])
        if self._breaker.passed(used=used):
            log.info("chunks are mixed into the passes of rows that decode again")
