"""What the APIs share: a parsed request with the client's names of its parts, checks of the objects
in it, and replies. Every function that reads a request raises `BadRequest` with the wrong part."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from ..errors import MLXProviderError, for_another, wrong_part
from ..invalid import quote
from ..protocol.event_queue import compact
from ..protocol.events import Accepted, Delta, Done, Event, Failed
from ..protocol.requests import ModelRequest

Fields = Mapping[str, Any]
T = TypeVar("T")
NAME = re.compile(r"(?<![\w.\]'\"])[a-z]\w*(?:\[\d+\]|\.\w+)*")
"""A field's name or path. Text in quotes is a value."""


@dataclass(frozen=True)
class ClientNames:
    of: dict[str, str] = field(default_factory=dict)
    """By our name. Parts of a part follow it."""

    def before(self, inner: ClientNames) -> ClientNames:
        """For a request translated twice: first by these names, then by `inner`."""
        return ClientNames(
            {**self.of, **{ours: self.text(name) for ours, name in inner.of.items()}}
        )

    def text(self, text: str) -> str:
        """A text with the client's names. A plain word counts as a name only at its beginning."""
        return NAME.sub(lambda found: self._name(found[0], first=not found.start()), text)

    def error(self, error: MLXProviderError) -> MLXProviderError:
        named = for_another(error)
        named.message = self.text(error.message)
        named.param = None if error.param is None else self.text(error.param)
        return named

    def events(self, events: list[Event]) -> list[Event]:
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
        head = path if first or not path.isalpha() else ""
        while head and head not in self.of:
            head = head[: max(head.rfind("."), head.rfind("["), 0)]
        return self.of[head] + path[len(head) :] if head else path


# -- checks of a request

WORDS: Mapping[Any, str] = {
    bool: "true or false",
    str: "a text",
    list: "a list",
    Mapping: "an object",
}


def expect(value: Any, kind: type[T], where: str, inside: str = "") -> T:
    if not isinstance(value, kind):
        raise wrong_part(where, f"must be {WORDS[kind]}, got {quote(value)}", inside)
    return value


def expect_object(value: Any, where: str, inside: str = "") -> Mapping[str, Any]:
    return expect(value, Mapping, where, inside)  # type: ignore[type-abstract]


def objects(items: Any, where: str, *, texts: bool = False) -> Iterator[tuple[str, Fields]]:
    """Each object of a list and its place in the request; `texts`: skip plain texts."""
    if not isinstance(items, list):
        raise wrong_part(where, f"must be a text or a list, got {type(items).__name__}")
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if isinstance(item, Mapping):
            yield at, item
        elif isinstance(item, BaseModel):  # a script can pass objects of a reply
            yield at, item.model_dump()
        elif not (texts and isinstance(item, str)):
            raise wrong_part(at, f"must be an object, got {type(item).__name__}")


def parts_of(
    content: Any, where: str, known: Collection[str] | None, *, texts: bool = False
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Place, type and object of each part. `known`: types that a model can take; `None`: others
    become text. `texts`: plain texts are allowed, and parts without a type are text."""
    if content is None or isinstance(content, str):
        return
    for at, part in objects(content, where, texts=texts):
        kind = (part.get("type") or "text") if texts else part.get("type")
        yield at, check_kind(kind, f"{at}.type", known), part


def check_kind(value: Any, where: str, known: Collection[str] | None = None) -> str:
    """The type of a part. `known`: `None` for an earlier turn, which may have any type."""
    if isinstance(value, str) and value and (known is None or value in known):
        return value
    if known is None:
        raise wrong_part(where, f"is {value!r}: it must be a text")
    allowed = ", ".join(known)
    raise wrong_part(where, f"is {value!r}, which is not supported: it must be one of {allowed}")


class Turns:
    """Messages of chat, and the places of their parts in a request of another API."""

    def __init__(self, places: Mapping[str, str] | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places = {**(places or {})}

    def add(self, message: dict[str, Any], where: str, content: str = "") -> None:
        self.messages.append(message)
        self.place("", where)
        self.place(".content", content or f"{where}.content")

    def place(self, part: str, where: str) -> None:
        self.places[f"messages[{len(self.messages) - 1}]{part}"] = where


# -- replies

COMMENT = b": the engine is at work\n\n"
HEADER = "x-mlx-warnings"
LONGEST = 1000
MANY = 1000
"""Events of a whole reply that are not joined."""


def header_text(warnings: Sequence[str]) -> str:
    """Printable ASCII on one line, cut at `LONGEST`."""
    text = "; ".join(warnings)
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:LONGEST]


def json_bytes(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")


def data_frame(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def event_frame(value: Mapping[str, object]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + data_frame(value)


class Stream(ABC):
    """Nothing follows an error, which is its last event."""

    media_type = "text/event-stream"
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
        """Raises the error of a choice that was cancelled."""

    @abstractmethod
    def _failure(self, error: MLXProviderError) -> Iterable[bytes]: ...


class WholeResponse(ABC):
    media_type = "application/json"
    heartbeat = b""
    streamed = False
    _events: Sequence[Event] = ()

    def feed(self, events: Sequence[Event]) -> bytes:
        body = self.body(events)
        return b"" if body is None else json_bytes(body)

    def body(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """The reply once `events` has the last one. Raises the error of a `Failed` event."""
        self._events = [*self._events, *events]
        last = events[-1]
        if isinstance(last, Failed):
            raise last.error.exception()
        if isinstance(last, Done) or len(self._events) > MANY:
            self._events = compact(self._events)
        return self._body(_without_broken(self._events), last) if isinstance(last, Done) else None

    @abstractmethod
    def _body(self, events: Sequence[Event], done: Done) -> dict[str, Any]: ...


def _without_broken(events: Sequence[Event]) -> list[Event]:
    """Without calls that turned out to be malformed after their beginning was sent: text or another
    call follows, and the content has all of their text."""
    begun: dict[int, tuple[int, str]] = {}
    broken: set[tuple[int, int]] = set()
    for delta in (event for event in events if isinstance(event, Delta)):
        text = [(-1, "{}")] if delta.content or delta.reasoning else []
        for index, piece in [*text, *((call.index, call.arguments) for call in delta.tool_calls)]:
            last, arguments = begun.get(delta.index, (-1, "{}"))
            if index != last and not _is_json(arguments):
                broken.add((delta.index, last))
            begun[delta.index] = index, arguments + piece if index == last >= 0 else piece
    return [_without_calls(event, broken) if broken else event for event in events]


def _without_calls(event: Event, broken: Collection[tuple[int, int]]) -> Event:
    if not isinstance(event, Delta):
        return event
    calls = [call for call in event.tool_calls if (event.index, call.index) not in broken]
    return event.model_copy(update={"tool_calls": calls})


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


class ResponseWriter(Protocol):
    media_type: str
    heartbeat: bytes
    """Sent while there are no events; empty: nothing."""
    streamed: bool

    def feed(self, events: Sequence[Event]) -> bytes:
        """A reply that is not streamed has all its bytes at its end, and raises the error of a
        `Failed` event."""


@dataclass(frozen=True)
class ParsedRequest:
    requests: Sequence[ModelRequest]
    """One, or one for each prompt of a text completion."""
    reply: Callable[[Accepted], ResponseWriter]
    names: ClientNames = field(default_factory=ClientNames)
    in_stream: tuple[type[MLXProviderError], ...] = ()
    """Errors that come in the stream, if there is one, also before acceptance."""
    joined: bool = True
    """Whether all requests make one reply, with the echo of its prompts."""


Read = Callable[[dict[str, Any], Mapping[str, Any]], ParsedRequest]
"""From a body, and the fields of its request that are not read from the body here: `model`,
`options`, and what the server knows of the sender."""
