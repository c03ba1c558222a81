"""Base classes of replies, streamed or whole. See `asked.Reply`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import MLXProviderError
from ..protocol.events import Done, Event, Failed
from . import sse
from .asked import JSON, json_bytes


class Streamed(ABC):
    """Nothing follows an error."""

    media_type = sse.MEDIA_TYPE
    heartbeat = sse.COMMENT
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
