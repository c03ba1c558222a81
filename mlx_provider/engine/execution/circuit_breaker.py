"""Disables a feature that keeps failing, and tries it again after growing waits."""

from __future__ import annotations

TOLERATED = 1
"""Failures after which the feature is still used."""
FIRST_WAIT = 256
"""Steps without failure after which the feature is tried again, or its failures are forgotten."""
LONGEST_WAIT = 2**16
"""About twenty minutes at fifty steps per second."""


class CircuitBreaker:
    """Counts steps and failures of a feature that has a fallback."""

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
        """Count a step without failure. Returns whether the feature is enabled again.

        `used`: the step used the feature. The first failure of a trial ends it and doubles the next
        wait, unless as many steps succeeded before.
        """
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
