"""Decides whether a chunk runs in its own pass or in the pass of the rows that decode."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..request import PrefillJob
from ..scheduling.plan import Chunk
from .circuit_breaker import CircuitBreaker
from .mixed_chunk import MixedChunk

log = logging.getLogger(__name__)


class MixedBatches:
    """Belongs to the engine thread."""

    def __init__(self, possible: bool) -> None:
        """`possible`: result of the probe."""
        self._possible = possible
        self._breaker = CircuitBreaker()
        self._recent: list[PrefillJob | None] = []
        """Jobs with chunks in the last pass and in this one. An error of either may show now."""
        self._apart: list[tuple[int, PrefillJob]] = []
        """Jobs with chunks that ran behind a pass of the rows without waiting, with the number of
        that pass."""
        self._passes = 0

    @property
    def allowed(self) -> bool:
        """Whether the next pass may include a chunk."""
        return self._possible and self._breaker.closed

    def take_along(self, chunk: Chunk | None) -> MixedChunk | None:
        """The part of the next pass that is not rows."""
        self._recent = [*self._recent[-1:], None if chunk is None else chunk.job]
        self._passes += 1
        self._apart = [(at, job) for at, job in self._apart if at >= self._passes - 2]
        if chunk is None:
            return None
        return mixed_chunk(chunk)

    def ran_apart(self, job: PrefillJob) -> None:
        """A chunk runs in its own pass, behind the last pass of the rows."""
        self._apart.append((self._passes, job))

    def blame(self) -> bool:
        """Restart the prompts in a failed pass. Returns whether any prompt was in it."""
        jobs = [job for job in self._recent if job is not None]
        for job in [*jobs, *(job for _, job in self._apart)]:
            job.restart()
        self._recent, self._apart = [], []
        if jobs and self._breaker.failed():
            log.error(
                "mixed passes failed %d times: chunks run in passes of their own now",
                self._breaker.failures,
            )
        return bool(jobs)

    def passed(self) -> None:
        """The last pass did not fail."""
        used = any(job is not None for job in self._recent[-1:])
        if self._breaker.passed(used=used):
            log.info("chunks share the passes of rows that decode again")


def mixed_chunk(chunk: Chunk) -> MixedChunk:
    """The chunk in the form that a pass over rows accepts."""
    job = chunk.job
    return MixedChunk(
        job.tokens[chunk.start : chunk.stop],
        _positions(job, chunk.start, chunk.stop),
        job.held(),
        ends_prompt=chunk.stop == len(job.tokens),
        sparse=job.places is not None,
    )


def _positions(job: PrefillJob, start: int, stop: int) -> Sequence[int]:
    if job.places is not None:
        return job.places[start:stop]
    rotary = job.prompt.positions
    if rotary is None:
        return range(start, stop)
    found: list[int] = rotary[0, start:stop].tolist()
    return found
