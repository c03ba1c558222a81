"""The events of one request, gathered until the last one."""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.events import Delta, Done, Event, Failed, Finish
from .answer import Answer
from .form import AnswerForm


class Collected:
    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self.done: Done | None = None
        self._answers: dict[int, Answer] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Raises the error of a `Failed` event."""
        for event in events:
            if isinstance(event, Failed):
                raise event.error.exception()
            self.take(event)

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._answer(event.index).add(event)
        elif isinstance(event, Finish):
            self._answer(event.index).finish = event
        elif isinstance(event, Done):
            self.done = event

    def answers(self) -> list[Answer]:
        answers = [self._answers[index] for index in sorted(self._answers)]
        best = self.form.best_of
        return answers if best is None else best.chosen(answers)

    def _answer(self, index: int) -> Answer:
        return self._answers.setdefault(index, Answer())
