"""A request in the form of one API, and how its reply is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from ..errors import MLXProviderError
from ..protocol.events import Accepted, Event
from ..protocol.requests import ModelRequest
from .places import Places

JSON = "application/json"


class Reply(Protocol):
    media_type: str
    heartbeat: bytes
    """Sent while there are no events; empty: nothing."""
    streamed: bool

    def feed(self, events: Sequence[Event]) -> bytes:
        """The bytes for some events; a reply that is not streamed has all of them at its end.
        Raises the error of a `Failed` event, unless the reply is streamed, which then tells it."""


@dataclass(frozen=True)
class Asked:
    requests: Sequence[ModelRequest]
    """One, or one for each prompt of a text completion."""
    reply: Callable[[Accepted], Reply]
    refusal: Callable[[MLXProviderError], bytes] | None = None
    """A stream with an error before acceptance, for clients that read errors only there; empty: the
    error gets its HTTP status."""
    places: Places = field(default_factory=Places)
    joined: bool = True
    """Whether all requests make one reply, with the echo of its prompts; else our own client joins
    them."""


Read = Callable[[dict[str, Any], Mapping[str, Any]], Asked]


def json_bytes(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")
