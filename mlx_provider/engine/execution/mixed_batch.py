"""Which chunks ride with rows that decode, and what becomes of them when a pass fails."""

from __future__ import annotations

import logging

from ..request import Prefill
from ..scheduling.scheduler import Chunk
from .piggyback import Rider

log = logging.getLogger(__name__)

TOLERATED = 1
"""Failed passes after which chunks still ride."""


class Rides:
    """Belongs to the engine thread."""

    def __init__(self, possible: bool) -> None:
        """`possible`: what the probe found."""
        self.possible = possible
        """Only where rows decode in one pass."""
        self._failed = 0
        self._aboard: list[Prefill | None] = []
        """Whose chunks rode in the last pass and in this one: an error of either may show now."""

    def allows(self, work: Prefill) -> bool:
        """Whether the next tokens of `work` may ride: text behind all media, in a cache begun."""
        return (
            self.possible
            and self._failed <= TOLERATED
            and work.cache is not None
            and all(span.end <= work.done for span in work.request.prompt.spans)
        )

    def board(self, chunk: Chunk | None) -> Rider | None:
        """What the next pass takes along."""
        self._aboard = [*self._aboard[-1:], None if chunk is None else chunk.work]
        if chunk is None:
            return None
        work = chunk.work
        positions = work.prompt.positions
        at = range(chunk.start, chunk.stop)
        return Rider(
            work.tokens[chunk.start : chunk.stop],
            at if positions is None else positions[0, chunk.start : chunk.stop].tolist(),
            work.held(),
        )

    def put_off(self) -> bool:
        """A pass has failed: whoever rode starts again. Whether anybody did, and may be why."""
        riders = [work for work in self._aboard if work is not None]
        for work in riders:
            work.restart()
        if riders:
            self._failed += 1
        if riders and self._failed == TOLERATED + 1:
            log.error("passes with riders failed %d times: chunks ride no more", self._failed)
        return bool(riders)

    def forgive(self) -> None:
        """Nothing has failed for long."""
        self._failed = 0
