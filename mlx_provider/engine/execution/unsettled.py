"""Passes of a row with drafts, until it is known how many of their tokens stay in its cache."""

from __future__ import annotations

from dataclasses import dataclass

from .mixed_chunk import Turned


@dataclass
class Unsettled:
    """The last pass of a row, and the pass before if the last one has followed its unread result.

    Results come in the order of the passes: `keep`, `follow`, `keep`, `settle`. `take_back` ends it
    before `follow`.
    """

    last: Turned
    before: Turned | None = None
    _kept: int | None = None
    """How many tokens stay of the oldest pass here."""

    @property
    def known(self) -> bool:
        """Whether the result of every pass here was told."""
        return self.before is None and self._kept is not None

    def keep(self, tokens: int) -> None:
        """The first `tokens` of the oldest pass stay, at least one. The last call counts."""
        self._kept = tokens

    def follow(self) -> None:
        """Shorten the cache by the drafts of the pass before that did not hold.

        Raises `RuntimeError` if no pass has followed another, or `keep` was not called.
        """
        if self.before is None or self._kept is None:
            raise RuntimeError("no result that a pass has followed was kept")
        self.last.take_back(self.before.tokens - self._kept)
        self.before, self._kept = None, 1 if self.last.tokens == 1 else None  # it had no drafts

    def take_back(self) -> None:
        """Remove the last pass, which has followed an unread result, and what did not hold before
        it."""
        if self.before is not None:
            self.last.take_back(self.last.tokens)
            self.before.keep(self._kept or 1)

    def settle(self) -> None:
        """Remove the drafts that did not hold. Raises `RuntimeError` unless it is `known`."""
        if self.before is not None or self._kept is None:
            raise RuntimeError("it is not known how many tokens of the pass stay")
        self.last.keep(self._kept)
