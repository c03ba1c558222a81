"""Compares the time of passes with the expectation. Imports no mlx."""

from __future__ import annotations

from .costs import NO_LOAD, Costs, Load


class PassTimer:
    """The device runs one pass after the other; the next one is launched before the last one ends.

    So the time between two ends is the time of one pass, or of several that ended together.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._launched: list[tuple[float, Load]] = []
        """Expected seconds of the passes on the device, and the cached tokens that they read."""
        self._since = 0.0

    def launched(self, expected: float, now: float, load: Load = NO_LOAD) -> None:
        """A pass was launched."""
        if now - self._since > sum(seconds for seconds, _ in self._launched):
            # unknown end: the engine was idle, another one ran, or an image was embedded
            self._launched.clear()
        if not self._launched:
            self._since = now
        self._launched.append((expected, load))

    def ended(self, now: float, *, left: int = 0, usual: bool = True) -> float:
        """All passes except the `left` newest have ended. Returns their time relative to the
        expectation; 0: unknown.

        `usual`: the passes are representative of the pace of the device.
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
        """Ignore the times of the passes on the device."""
        self._launched.clear()
