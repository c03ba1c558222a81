"""White space at the end of an answer before a possible call."""

from __future__ import annotations

from .turn_layout import trailing


class AnswerEdge:
    """Passes an answer on, but holds back white space at its end until the next part is known.
    Before more answer or the end, it is text. Before calls, only what the chat template does not
    write there itself (`joint`) is text; if an answer follows after all, so is the rest."""

    def __init__(self, joint: str | None) -> None:
        self._joint = joint
        self._space = ""
        self._called = False

    def push(self, text: str) -> str:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._called = self._called and not shown
        return shown

    def call(self) -> str:
        kept = "" if self._called else trailing(self._space, self._joint)
        self._space, self._called = self._space[len(kept) :], True
        return kept

    def finish(self) -> str:
        space, self._space = self._space, ""
        return "" if self._called else space

    @property
    def held(self) -> int:
        return 0 if self._called else len(self._space)
