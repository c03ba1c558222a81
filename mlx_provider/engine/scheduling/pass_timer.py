"""Compares what passes take with what they were expected to take. Imports no mlx."""

from __future__ import annotations

from .costs import NO_LOAD, Costs, Load


class PassTimer:
    """The device runs passes one after the other, the next one launched before the last has ended.

    So what passes between two ends is the time of one pass, or of those that ended together.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._launched: list[tuple[float, Load]] = []
        """Expected seconds of the passes on the device, and what they read of caches."""
        self._since = 0.0

    def launched(self, expected: float, now: float, load: Load = NO_LOAD) -> None:
        """A pass was handed to the device."""
        if now - self._since > sum(seconds for seconds, _ in self._launched):
            # ended, nobody knows when: the engine was idle, or another ran, or an image came
            self._launched.clear()
        if not self._launched:
            self._since = now
        self._launched.append((expected, load))

    def ended(self, now: float, *, left: int = 0, usual: bool = True) -> float:
        """All passes but the `left` newest have ended; times as long as expected, 0: unknown.

        `usual`: they tell at which pace the device runs.
        """
        done = len(self._launched) - left
        ended, seconds = self._launched[:done], now - self._since
        expected = sum(each for each, _ in ended)
        del self._launched[:done]
        self._since = now
        if usual:
            self._costs.measured(expected, seconds, [load for _, load in ended])
        return seconds / expected if expected > 0 else 0.0

    def forget(self) -> None:
        """What is on the device tells nothing about time."""
        self._launched.clear()
