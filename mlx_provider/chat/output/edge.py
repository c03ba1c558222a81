"""White space at the end of an answer that calls may follow."""

from __future__ import annotations

from .turn_layout import trailing


class AnswerEdge:
    """Passes an answer on without the white space at its end, until it is known what follows.

    More answer, or the reply's end: it is text. Calls: only what the chat template will not write
    before them (`joint`) is; should an answer follow them yet, the rest is text, too.
    """

    def __init__(self, joint: str | None) -> None:
        self._joint = joint
        self._space = ""
        self._called = False

    def push(self, text: str) -> str:
        """The part of all text so far that is shown."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._called = self._called and not shown
        return shown

    def call(self) -> str:
        """A call follows; returns the white space that stays with the answer."""
        kept = "" if self._called else trailing(self._space, self._joint)
        self._space, self._called = self._space[len(kept) :], True
        return kept

    def finish(self) -> str:
        """Nothing follows; returns the white space that is text."""
        space, self._space = self._space, ""
        return "" if self._called else space

    @property
    def held(self) -> int:
        """Characters of which it is not known what they are."""
        return 0 if self._called else len(self._space)
