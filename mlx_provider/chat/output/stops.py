"""Stop strings in text, independent of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopText:
    """Passes text on up to the first stop string; holds back a possible beginning of one. The stop
    string that completes first wins, as if text came character by character. Linear time per stop
    string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(x) for x in stops if x]
        self._held = ""
        self.matched = ""

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self.matched:
            return ""
        found = [(end, -len(x.text), x.text) for x in self._stops if (end := x.feed(text))]
        before, text = len(self._held), self._held + text
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: before + end - len(self.matched)]
        at = len(text) - max(x.begun for x in self._stops)
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.begun = 0
        return held

    @property
    def held(self) -> int:
        return len(self._held)


class _Stop:
    """One stop string (Knuth-Morris-Pratt). The table grows only as far as text has matched."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        """Length of the prefix that is a suffix of the text."""
        self._borders = array("L", (0, 0))
        """Per prefix length: the longest proper prefix that is also a suffix."""

    def feed(self, text: str) -> int:
        """Characters of `text` that complete the stop string; 0: incomplete."""
        wanted, begun = self.text, self.begun
        if not begun and wanted[0] not in text:
            return 0
        for size, letter in enumerate(text, 1):
            while begun and wanted[begun] != letter:
                begun = self._border(begun)
            begun += wanted[begun] == letter
            if begun == len(wanted):
                return size
        self.begun = begun
        return 0

    def _border(self, size: int) -> int:
        wanted, borders = self.text, self._borders
        while len(borders) <= size:
            letter, border = wanted[len(borders) - 1], borders[-1]
            while border and wanted[border] != letter:
                border = borders[border]
            borders.append(border + (wanted[border] == letter))
        return borders[size]
