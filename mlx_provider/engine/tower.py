"""A run of the vision tower over the media of one prompt, a slice of layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..records import EmbedsInSlices, Features, LoadedModel, MediaSpan


class Tower:
    """Engine thread only. Without references, the memory of its results is free."""

    def __init__(
        self, model: LoadedModel, spans: Sequence[MediaSpan], clock: Callable[[], float]
    ) -> None:
        self.waiting = list(spans)
        """Media without features, in the order of the prompt."""
        self._slices = _slices(model, spans)
        self._clock = clock
        self._last = 0.0
        """Seconds of the last slice, or the least that it can have taken."""

    def run(self, seconds: float) -> list[Features]:
        """Run at least one slice, and more while they end within `seconds`. Returns the complete
        features."""
        called = self._clock()
        found = list(next(self._slices))
        began = now = self._clock()
        # the first slice has also waited for the rows' pass, which takes 2 * `seconds` at most
        self._last = max(self._last, now - called - 2 * seconds)
        while len(found) < len(self.waiting) and now - began + 2 * self._last <= seconds:
            found += next(self._slices)
            before, now = now, self._clock()
            self._last = now - before
        return found


def _slices(model: LoadedModel, spans: Sequence[MediaSpan]) -> Iterator[Sequence[Features]]:
    """A model without slices has one for each media item."""
    if isinstance(model, EmbedsInSlices):
        return model.embed_in_slices(spans)
    return ([model.embed(span)] for span in spans)
