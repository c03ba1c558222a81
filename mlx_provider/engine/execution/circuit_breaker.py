"""Gives up what keeps failing, and tries it again after a wait that grows with each time."""

from __future__ import annotations

TOLERATED = 1
"""Failures after which a thing is still used."""
FIRST_WAIT = 256
"""Quiet steps after which it is tried again, and after which its failures are forgotten."""
LONGEST_WAIT = 2**16
"""Some twenty minutes at fifty steps a second."""


class CircuitBreaker:
    """Counts steps and failures of one thing that has something to stand in for it."""

    def __init__(self) -> None:
        self.closed = True
        """The thing is in use."""
        self.failures = 0
        self._quiet = 0
        self._wait = FIRST_WAIT

    def failed(self) -> bool:
        """Count a failure, of the thing or of what stands in; whether it is given up with this."""
        self._quiet = 0
        if not self.closed:
            return False
        self.failures += 1
        self.closed = self.failures <= TOLERATED
        return not self.closed

    def passed(self, *, used: bool) -> bool:
        """Count a step without a failure; whether the thing is tried again from here on.

        `used`: the step says something of the thing while it is in use. The first failure of a try
        ends it, and the next wait is twice as long, unless as many steps went well before.
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
