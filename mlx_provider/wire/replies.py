"""Warnings of a request as a header of its response.

Server-sent events.

Base classes of replies, streamed or whole. See `asked.Reply`.

A result for each input of a request, as one reply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import MLXProviderError
from ..protocol.events import Accepted, Done, Embedded, Event, Failed
from .body import JSON, json_bytes

HEADER = "x-mlx-warnings"
LONGEST = 1000


def header_text(warnings: Sequence[str]) -> str:
    """Printable ASCII on one line, cut at `LONGEST`."""
    text = "; ".join(warnings)
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:LONGEST]


MEDIA_TYPE = "text/event-stream"
COMMENT = b": the engine is at work\n\n"
"""Clients ignore comments."""


def data(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def named(value: Mapping[str, object]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


class Streamed(ABC):
    """Nothing follows an error."""

    media_type = MEDIA_TYPE
    heartbeat = COMMENT
    streamed = True
    _ended = False

    def feed(self, events: Sequence[Event]) -> bytes:
        out: list[bytes] = []
        try:
            for event in events:
                if self._ended:
                    break
                if isinstance(event, Failed):
                    raise event.error.exception()
                out.extend(self._frames(event))
        except MLXProviderError as error:
            self._ended = True
            out.extend(self._failure(error))
        return b"".join(out)

    @abstractmethod
    def _frames(self, event: Event) -> Iterable[bytes]:
        """Server-sent events. Raises the error of a choice that was cancelled."""

    @abstractmethod
    def _failure(self, error: MLXProviderError) -> Iterable[bytes]:
        """The end of a stream that failed."""


class Whole(ABC):
    media_type = JSON
    heartbeat = b""
    streamed = False

    def feed(self, events: Sequence[Event]) -> bytes:
        for event in events:
            if isinstance(event, Failed):
                raise event.error.exception()
            self._take(event)
            if isinstance(event, Done):
                return json_bytes(self._body(event))
        return b""

    @abstractmethod
    def _take(self, event: Event) -> None:
        """Keep what the body needs of it."""

    @abstractmethod
    def _body(self, done: Done) -> dict[str, Any]:
        """The reply, once every event is known."""


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
