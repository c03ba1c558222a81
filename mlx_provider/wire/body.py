"""The client's names for the parts of a request. The engine's errors and warnings name fields of
its own request: `max_tokens`, `messages[3].content[1]`; other APIs have other names.

A request in the form of one API, and how its reply is written.

Checks of the objects in a request that another API reads before it is chat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic_core import to_json

from ..errors import BadRequest, MLXProviderError, for_another
from ..protocol.events import Accepted, Event, Failed
from ..protocol.requests import ModelRequest

NAME = re.compile(r"(?<![\w.\]'\"])[a-z]\w*(?:\[\d+\]|\.\w+)*")
"""A field's name or path. Text in quotes is a value."""


@dataclass(frozen=True)
class Places:
    of: dict[str, str] = field(default_factory=dict)
    """By our name. Parts of a part follow it."""

    def before(self, inner: Places) -> Places:
        """For a request translated twice: first by these names, then by `inner`."""
        return Places({**self.of, **{ours: self.text(name) for ours, name in inner.of.items()}})

    def text(self, text: str) -> str:
        """A text with the client's names. A plain word counts as a name only at its beginning."""
        return NAME.sub(lambda found: self._name(found[0], first=not found.start()), text)

    def error(self, error: MLXProviderError) -> MLXProviderError:
        named = for_another(error)
        named.message = self.text(error.message)
        named.param = None if error.param is None else self.text(error.param)
        return named

    def events(self, events: list[Event]) -> list[Event]:
        """Only the last event can be an error."""
        last = events[-1] if events else None
        if not isinstance(last, Failed):
            return events
        return [*events[:-1], Failed.of(self.error(last.error.exception()))]

    @contextmanager
    def naming(self) -> Iterator[None]:
        try:
            yield
        except MLXProviderError as error:
            raise self.error(error) from None

    def _name(self, path: str, *, first: bool) -> str:
        if path.isalpha() and not first:
            return path
        for head in _heads(path):
            if head in self.of:
                return self.of[head] + path[len(head) :]
        return path


def _heads(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path[: max(path.rfind("."), path.rfind("["), 0)]


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


def objects(
    items: Any, where: str, *, texts: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a list and its place in the request; `texts`: plain texts are allowed."""
    if not isinstance(items, list):
        raise BadRequest(
            f"{where} must be a text or a list, got {type(items).__name__}", param=where
        )
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if isinstance(item, Mapping):
            yield at, item
        elif isinstance(item, BaseModel):  # a script can pass objects of a reply
            yield at, item.model_dump()
        elif not (texts and isinstance(item, str)):
            raise BadRequest(f"{at} must be an object, got {type(item).__name__}", param=at)


def check_known(value: Any, known: Collection[str], where: str) -> None:
    if not isinstance(value, str) or value not in known:
        raise BadRequest(
            f"{where} is {value!r}, which is not supported: it must be one of {', '.join(known)}",
            param=where,
        )


def check_kind(value: Any, where: str) -> None:
    """The type of a part of an earlier turn; another server's types are allowed."""
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{where} is {value!r}: it must be a text", param=where)


def check_text(part: Mapping[str, Any], where: str) -> None:
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a text", param=where)
