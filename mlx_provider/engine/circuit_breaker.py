"""Disables a feature that keeps failing, such as batching, and retries it after growing waits."""

import logging

log = logging.getLogger(__name__)
TOLERATED = 1
"""Failures after which the feature is still used."""
FIRST_WAIT = 256
"""Steps without failure after which the feature is tried again, or its failures are forgotten."""
LONGEST_WAIT = 2**16
"""About twenty minutes at fifty steps per second."""


class CircuitBreaker:
    def __init__(self, disabled: str = "", enabled: str = "") -> None:
        """Texts for the log, if any: `disabled` has a place for the number of failures."""
        self._disabled, self._enabled = disabled, enabled
        self.closed = True
        self.failures = 0
        self._successes = 0
        self._needed = FIRST_WAIT

    def record_failure(self) -> bool:
        """Count a failure of the feature or of its fallback. Returns whether this disables it."""
        self._successes = 0
        if not self.closed:
            return False
        self.failures += 1
        self.closed = self.failures <= TOLERATED
        if self._disabled and not self.closed:
            log.error(self._disabled, self.failures)
        return not self.closed

    def record_success(self, *, used: bool) -> bool:
        """Count a step without failure. Returns whether the feature is enabled again. `used`: the
        step used the feature. The first failure of a trial ends it and doubles the next wait,
        unless as many steps succeeded before."""
        if self.closed and not used:
            return False
        self._successes += 1
        if self._successes < self._needed:
            return False
        self._successes = 0
        if self.closed:
            self.failures, self._needed = 0, FIRST_WAIT
            return False
        self.closed, self.failures = True, TOLERATED
        self._needed = min(2 * self._needed, LONGEST_WAIT)
        if self._enabled:
            log.info(self._enabled)
        return True
