"""A result for each input of a request, as one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.events import Accepted, Done, Embedded, Event, Failed, Scored
from .asked import JSON, json_bytes


class Results:
    """See `asked.Reply`."""

    media_type = JSON
    heartbeat = b""
    streamed = False

    def __init__(
        self, accepted: Accepted, body: Callable[[Accepted, Sequence[Any], Done], dict[str, Any]]
    ) -> None:
        """`body`: makes the reply from the results, in the order of the inputs, and the end."""
        self._accepted = accepted
        self._body = body
        self._found: list[Embedded | Scored] = []

    def feed(self, events: Sequence[Event]) -> bytes:
        for event in events:
            if isinstance(event, Embedded | Scored):
                self._found.append(event)
            elif isinstance(event, Failed):
                raise event.error.exception()
            elif isinstance(event, Done):
                found = sorted(self._found, key=lambda each: each.index)
                return json_bytes(self._body(self._accepted, found, event))
        return b""
