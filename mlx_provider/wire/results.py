"""A result for each input of a request, as one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.events import Accepted, Done, Embedded, Event
from .replies import Whole


class Results(Whole):
    def __init__(
        self, accepted: Accepted, body: Callable[[Accepted, Sequence[Any], Done], dict[str, Any]]
    ) -> None:
        """`body` makes the reply from the results, in the order of the inputs, and the end."""
        self._accepted = accepted
        self._made = body
        self._found: list[Embedded] = []

    def _take(self, event: Event) -> None:
        if isinstance(event, Embedded):
            self._found.append(event)

    def _body(self, done: Done) -> dict[str, Any]:
        found = sorted(self._found, key=lambda each: each.index)
        return self._made(self._accepted, found, done)
