"""What the APIs share: a parsed request with the client's names of its parts, checks of the objects
in it, and replies. A check raises a `BadRequest` that names the wrong part by its place (`where`),
a path such as `messages[0].content`. `inside` is a path below that, only for the message."""

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

Fields = Mapping[str, Any]  # a JSON object
T = TypeVar("T")
NAME = re.compile(r"(?<![\w.\]'\"])[a-z]\w*(?:\[\d+\]|\.\w+)*")
"""A field's name or path in a message. Text in quotes is a value, not a name."""


@dataclass(frozen=True)
class ClientNames:
    """The client's names of the parts of our request, by our name. What follows in a path, such as
    `[0].text`, stays. For messages to the client."""

    of: dict[str, str] = field(default_factory=dict)

    def before(self, inner: ClientNames) -> ClientNames:
        """Names for a request translated twice: from the client's form into another API's, whose
        parts these names are for, and from that into ours, by `inner`."""
        translated = {ours: self.text(name) for ours, name in inner.of.items()}
        return ClientNames({**self.of, **translated})

    def text(self, text: str) -> str:
        """A message with the client's names. A plain word, such as `stop`, is taken for a name only
        at its beginning."""
        return NAME.sub(lambda found: self._name(found[0], first=not found.start()), text)

    def error(self, error: MLXProviderError) -> MLXProviderError:
        """A copy with the client's names."""
        named = for_another(error)
        named.message = self.text(error.message)
        named.param = None if error.param is None else self.text(error.param)
        return named

    def events(self, events: list[Event]) -> list[Event]:
        """The same events, with the client's names in the error of a last `Failed`."""
        last = events[-1] if events else None
        if not isinstance(last, Failed):
            return events
        return [*events[:-1], Failed.of(self.error(last.error.exception()))]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of the block get the client's names."""
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

WORDS: dict[Any, str] = {bool: "true or false", str: "a text", list: "a list", Mapping: "an object"}


def expect(value: Any, kind: type[T], where: str, inside: str = "") -> T:
    """Return the value. `kind`: a key of `WORDS`."""
    if not isinstance(value, kind):
        raise wrong_part(where, f"must be {WORDS[kind]}, got {quote(value)}", inside)
    return value


def expect_object(value: Any, where: str, inside: str = "") -> Mapping[str, Any]:
    return expect(value, Mapping, where, inside)  # type: ignore[type-abstract]


def objects(items: Any, where: str, *, texts: bool = False) -> Iterator[tuple[str, Fields]]:
    """Place and object of each entry of a list. `texts`: plain texts are allowed, and skipped."""
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
    """Place, type and object of each part of a content that is a list. `known`: allowed types;
    `None`: all; chat makes text of others. `texts`: plain texts are skipped; no type: `text`."""
    if content is None or isinstance(content, str):
        return
    for at, part in objects(content, where, texts=texts):
        kind = (part.get("type") or "text") if texts else part.get("type")
        yield at, check_kind(kind, f"{at}.type", known), part


def check_kind(value: Any, where: str, known: Collection[str] | None = None) -> str:
    """Return a part's type. `known`: those that are allowed; `None`: all, in an earlier turn."""
    if isinstance(value, str) and value and (known is None or value in known):
        return value
    if known is None:
        raise wrong_part(where, f"is {value!r}: it must be a text")
    allowed = ", ".join(known)
    raise wrong_part(where, f"is {value!r}, which is not supported: it must be one of {allowed}")


class Turns:
    """Collects messages of chat that are made from a request of another API."""

    def __init__(self, places: Mapping[str, str] | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places = {**(places or {})}  # by path in `messages`: the place in that request

    def add(self, message: dict[str, Any], where: str, content: str = "") -> None:
        """`where`, `content`: the places of the message and of its content."""
        self.messages.append(message)
        self.place("", where)
        self.place(".content", content or f"{where}.content")

    def place(self, part: str, where: str) -> None:
        """Add the place of a part of the last message, such as `.content[0]`."""
        self.places[f"messages[{len(self.messages) - 1}]{part}"] = where


# -- replies

COMMENT = b": the engine is at work\n\n"
HEADER = "x-mlx-warnings"  # of HTTP responses
LONGEST = 1000  # characters of this header
MANY = 1000  # events that a whole reply collects before it joins them


def header_text(warnings: Sequence[str]) -> str:
    """Warnings as printable ASCII on one line, cut at `LONGEST`."""
    text = "; ".join(warnings)
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:LONGEST]


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8. NaN and infinity become `null`."""
    return to_json(value, inf_nan_mode="null")


def data_frame(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def event_frame(value: Mapping[str, object]) -> bytes:
    """A server-sent event whose name is the `type` in `value`; `data_frame` makes one without."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data_frame(value)


class ResponseWriter(Protocol):
    """Turns the events of one request into the bytes of an HTTP response."""

    media_type: str
    heartbeat: bytes  # sent while there are no events; empty: nothing is sent
    streamed: bool

    def feed(self, events: Sequence[Event]) -> bytes:
        """The bytes for the next events. A reply that is not streamed has all its bytes at its end,
        and raises the error of a `Failed`."""


class Stream(ABC):
    """Base of replies in server-sent events. An error is the last of them."""

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
        """Bytes for one event. Raises the error of a choice that was cancelled."""

    @abstractmethod
    def _failure(self, error: MLXProviderError) -> Iterable[bytes]: ...


class WholeResponse(ABC):  # base of replies in one JSON object
    media_type = "application/json"
    heartbeat = b""
    streamed = False
    _events: Sequence[Event] = ()

    def feed(self, events: Sequence[Event]) -> bytes:
        body = self.body(events)
        return b"" if body is None else json_bytes(body)

    def body(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """The reply if `events` has the last one, else `None`. Raises the error of a `Failed`."""
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
    """The events without broken calls, which turned out to be malformed after their beginning was
    sent. Text or another call follows a broken call, and the content repeats all of its text."""
    no_call = -1, ""
    last_calls: dict[int, tuple[int, str]] = {}  # by choice: index and arguments so far
    broken: set[tuple[int, int]] = set()  # choice and index of calls
    for delta in (event for event in events if isinstance(event, Delta)):
        pieces = [no_call] if delta.content or delta.reasoning else []
        pieces += [(call.index, call.arguments) for call in delta.tool_calls]
        for index, piece in pieces:
            last, arguments = last_calls.get(delta.index, no_call)
            if index != last:
                if last >= 0 and not _is_json(arguments):
                    broken.add((delta.index, last))
                arguments = ""
            last_calls[delta.index] = index, arguments + piece
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


@dataclass(frozen=True)
class ParsedRequest:  # a client's request in our form, and the form of its reply
    requests: Sequence[ModelRequest]  # one, or one for each prompt of a text completion
    reply: Callable[[Accepted], ResponseWriter]
    names: ClientNames = field(default_factory=ClientNames)
    in_stream: tuple[type[MLXProviderError], ...] = ()
    """Errors that a stream reports itself even before acceptance. Others are then HTTP errors."""
    joined: bool = True
    """Whether `submit_all` makes one reply of all requests, and writes their `echo` into it."""


Read = Callable[[dict[str, Any], Mapping[str, Any]], ParsedRequest]
"""Translates a body, which it may change. The second argument has fields of the request that do not
come from the body here: `model`, `options`, and what the server knows of the sender."""
