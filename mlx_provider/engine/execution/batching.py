"""Features that are disabled if they keep failing, and tried again after growing waits."""

import logging
from collections.abc import Sequence

from ..request import PrefillJob
from ..scheduling.chunking import Chunk
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
        self.failures = 0
        self._quiet = 0
        self._wait = FIRST_WAIT

    def failed(self) -> bool:
        """Count a failure of the feature or of its fallback. Returns whether it disables it."""
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
            times = self._breaker.failures
            log.error("mixed passes failed %d times: chunks run in passes of their own now", times)
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
