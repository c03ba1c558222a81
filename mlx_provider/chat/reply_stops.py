"""Stop strings on text, however it was tokenised."""

from __future__ import annotations

from collections.abc import Sequence

from ..records.reading import partial_at


class StopText:
    """Passes text on up to the first stop string; holds back what may begin one.

    Of several stop strings the one that is complete first wins, as if the text had come
    character by character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(x for x in stops if x)
        self._held = ""
        self.matched = ""
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The part of all text so far that can now be shown; nothing after a match."""
        if not self._stops:
            return text
        if self.matched:
            return ""
        text = self._held + text
        found = [(at + len(x), at, x) for x in self._stops if (at := text.find(x)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        at = partial_at(text, self._stops)
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """What was held back: no stop string can follow."""
        held, self._held = self._held, ""
        return held

    @property
    def held(self) -> int:
        """Characters held back."""
        return len(self._held)
