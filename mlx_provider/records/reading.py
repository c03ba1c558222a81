"""A cursor over a reply that is still being written.

A generator reads a format with a `TextReader`. It yields if it needs text that has not arrived, and
its driver resumes it after `feed`. Its result cannot depend on how the text was cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that yields while it waits for text, and returns its result."""
Emit = Callable[[str], None]
ShowText = Callable[["TextReader", Emit], Reading[None]]
"""Reads on, and emits what it reads as text."""
_SPACE = re.compile(r"\s*")


class NotACall(ValueError):
    """The text after a marker is no call. `whole`: everything from the marker to here is text; if
    not, only the marker is, and calls are looked for after it. A parser that has begun to read
    values sets `whole`, because text in a value may look like a call. `then` shows the text that
    follows, and implies `whole`."""

    def __init__(
        self, message: str = "", *, whole: bool = False, then: ShowText | None = None
    ) -> None:
        super().__init__(message)
        self.whole = whole or then is not None
        self.then = then


class TextEnded(Exception):
    """The reply ended where a format needed more text."""


@dataclass(frozen=True)
class TextEvent:
    """`content` and `reasoning` are pieces of the answer and of thoughts. `call` opens a call
    (`text`: its name; `id`: if the model wrote one), `arguments` is a piece of its JSON text,
    `close` ends a complete call. `reason`: thoughts begin. `answer`: they have ended."""

    kind: Literal["content", "reasoning", "call", "arguments", "close", "reason", "answer"]
    text: str = ""
    id: str = ""


class TextReader:
    """Reads a reply as it arrives, and collects in `events` what generators report about it. Call
    the methods that return a `Reading` with `yield from`: they wait for text."""

    def __init__(self) -> None:
        self.events: list[TextEvent] = []
        self.ended = False
        self._text = ""  # the reply from position `_base` on: text before that is not needed
        self._base = 0
        self._at = 0  # index in `_text` of the first character that is not read
        self._marks = 0  # open marks
        self._calls = 0
        self._calls_end = 0
        self._holding = False
        self._held: list[TextEvent] = []  # while holding: what may go out; `events` may be dropped
        self._held_calls = 0  # while holding: `_calls` without those that may be dropped

    # ---- the driver's side

    def feed(self, text: str) -> None:
        """Add text that has arrived."""
        if self._marks == 0 and self._at:
            self._base += self._at
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def close(self) -> None:
        """The reply has ended: no text follows."""
        self.ended = True

    @property
    def position(self) -> int:
        """Characters read since the reply's beginning."""
        return self._base + self._at

    # ---- reports: each adds an event, unless its text is empty

    def content(self, text: str) -> None:
        if text:
            self.events.append(TextEvent("content", text))

    def reasoning(self, text: str) -> None:
        if text:
            self.events.append(TextEvent("reasoning", text))

    def reason(self) -> None:
        """Thoughts begin."""
        self.events.append(TextEvent("reason"))

    def answer(self) -> None:
        """Thoughts have ended."""
        self.events.append(TextEvent("answer"))

    def call(self, name: str, call_id: str = "") -> None:
        """A call begins. Unless calls are held, this cannot be taken back. `call_id`: if the model
        wrote one. Raises `NotACall` for half of a surrogate pair in the name or id."""
        if any("\ud800" <= character <= "\udfff" for character in name + call_id):
            raise NotACall("half a surrogate pair is no name", whole=True)
        self._calls += 1
        self.events.append(TextEvent("call", name, call_id))

    def arguments(self, text: str) -> None:
        """A piece of the call's JSON text. Half of a surrogate pair becomes its escape."""
        if text:
            text = text.encode("utf-8", "backslashreplace").decode()
            self.events.append(TextEvent("arguments", text))

    def end_call(self) -> None:
        self._calls_end = self.position
        self.events.append(TextEvent("close"))
        if self._holding:
            self._held.extend(self.events)
            self._held_calls, self.events = self._calls, []

    @property
    def calls_begun(self) -> int:
        """Number of calls so far, complete or not, without those that were dropped again."""
        return self._calls

    @property
    def calls_end(self) -> int:
        """Position of the end of the last complete call."""
        return self._calls_end

    # ---- going back

    def hold_calls(self) -> None:
        """Hold back events from here on, each until a call is complete or `release_calls`."""
        self._holding, self._held, self._held_calls = True, self.events, self._calls
        self.events = []

    def release_calls(self, *, keep: bool) -> None:
        """Report what was held back, or drop it."""
        found, self.events = self.events, self._held
        self._holding, self._held = False, []
        if keep:
            self.events.extend(found)
        else:
            self._calls = self._held_calls

    def give_up(self) -> None:
        """After a generator has failed: drop what is held, and all marks."""
        if self._holding:
            self.release_calls(keep=False)
        self.forget_marks()

    def take_events(self) -> list[TextEvent]:
        """Events that are not held back; each is returned once."""
        if self._holding:
            found, self._held = self._held, []
        else:
            found, self.events = self.events, []
        return found

    def mark(self) -> int:
        """The position here, for `rewind`. Text after it is kept until `rewind` or `drop_mark`."""
        self._marks += 1
        return self.position

    def drop_mark(self) -> None:
        self._marks -= 1

    def forget_marks(self) -> None:
        self._marks = 0

    def rewind(self, mark: int) -> None:
        """Return to `mark` and forget it."""
        self._marks -= 1
        self._at = mark - self._base

    # ---- reading

    def unread(self) -> str:
        """Text that has arrived and is not read."""
        return self._text[self._at :]

    def between(self, start: int, end: int) -> str:
        """Text from one position to another, both after the oldest mark."""
        return self._text[start - self._base : end - self._base]

    def skip(self, count: int) -> str:
        """Read `count` characters, or fewer if no more have arrived."""
        found = self._text[self._at : self._at + count]
        self._at += len(found)
        return found

    def more(self) -> Reading[bool]:
        """Wait until more text arrives. Returns `False` if the reply ends first."""
        size = len(self._text) + self._base
        while len(self._text) + self._base == size and not self.ended:
            yield
        return len(self._text) + self._base > size

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters without reading them; fewer only at the reply's end."""
        while len(self._text) - self._at < count:
            if not (yield from self.more()):
                break
        return self._text[self._at : self._at + count]

    def char(self) -> Reading[str]:
        """Read one character. Raises `TextEnded`."""
        while self._at >= len(self._text):
            if not (yield from self.more()):
                raise TextEnded
        found = self._text[self._at]
        self._at += 1
        return found

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest text of which every character matches `pattern` (`[...]*`)."""
        parts: list[str] = []
        while True:
            parts.append(self._read_match(pattern))
            if self._at < len(self._text) or not (yield from self.more()):
                return "".join(parts)

    def run_some(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Like `run`, but only what has arrived; waits where nothing has."""
        yield from self.peek()
        return self._read_match(pattern)

    def _read_match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        return self.skip(len(match.group()) if match else 0)

    def space(self) -> Reading[str]:
        """Read all white space at this position."""
        return (yield from self.run(_SPACE))

    def at(self, *literals: str) -> Reading[str]:
        """The longest of `literals` at this position, unread; empty: none."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals), default=0)]
            if not self.ended and any(x != rest and x.startswith(rest) for x in literals):
                yield from self.more()
                continue
            return max((x for x in literals if rest.startswith(x)), key=len, default="")

    def accept(self, *literals: str) -> Reading[str]:
        """Read the longest of `literals` at this position; empty: none."""
        found = yield from self.at(*literals)
        self._at += len(found)
        return found

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`. Raises `TextEnded` if the reply ends in it, else `NotACall`."""
        if (yield from self.accept(literal)):
            return
        rest = self._text[self._at : self._at + len(literal)]
        if self.ended and literal.startswith(rest):
            raise TextEnded
        raise NotACall(f"expected {literal!r}")

    def pass_until(self, literals: Sequence[str], emit: Emit) -> Reading[str]:
        """Read up to the first of `literals`, which is returned and stays unread. The text before
        it goes to `emit` as soon as no literal can begin in it. Empty: the reply ended."""
        wanted = tuple(literals)
        pattern = _search(wanted) if wanted else None
        while True:
            match = pattern.search(self._text, self._at) if pattern else None
            held = partial_at(self._text, wanted, self._at) if not self.ended else None
            if match and (held is None or match.start() < held):
                emit(self.skip(match.start() - self._at))
                return match.group()
            stop = len(self._text) if held is None else held
            if stop > self._at:
                emit(self.skip(stop - self._at))
            if not (yield from self.more()) and held is None:
                return ""

    def until(self, *literals: str) -> Reading[str]:
        """Read up to the first of `literals` (unread). Raises `TextEnded` if none comes."""
        parts: list[str] = []
        if not (yield from self.pass_until(literals, parts.append)):
            raise TextEnded
        return "".join(parts)

    def rest(self) -> Reading[str]:
        """Read to the reply's end."""
        parts: list[str] = []
        yield from self.pass_until((), parts.append)
        return "".join(parts)


def read_turn_ends(
    reader: TextReader, ends: Sequence[str], openers: Sequence[str], markers: Sequence[str] = ()
) -> Reading[str]:
    """Read `ends` of turns directly after a call; elsewhere they are text. If the reply ends inside
    one of `ends`, `openers` or `markers`, that piece is dropped. Returns the white space before the
    next text."""
    while True:
        space = yield from reader.space()
        found = yield from reader.at(*ends, *openers, *markers)
        if ends_within(reader, (*ends, *openers, *markers)):
            reader.skip(len(reader.unread()))
            return ""
        if found not in ends or found in openers:
            return space
        reader.skip(len(found))


def ends_within(reader: TextReader, literals: Iterable[str]) -> bool:
    """Whether the reply has ended inside one of `literals`."""
    rest = reader.unread()
    return reader.ended and bool(rest) and any(x != rest and x.startswith(rest) for x in literals)


def partial_at(text: str, literals: Iterable[str], start: int = 0) -> int:
    """The first index from `start` on at which the rest of `text` is the beginning of a literal;
    `len(text)`: nowhere. Caches no literals, which may be a client's."""
    found = len(text)
    for literal in literals:
        at = max(start, len(text) - len(literal) + 1)
        while (at := text.find(literal[:1], at, found)) >= 0:
            if literal.startswith(text[at:]):
                found = at
                break
            at += 1
    return found


@lru_cache(maxsize=512)
def _search(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(x) for x in sorted(literals, key=len, reverse=True)))
