"""Tool parsers and reasoning parsers: how a model family writes calls and thoughts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .grammar import CallGrammar, MessageGrammar
from .reading import Reading, TextReader

Tools = Sequence[Mapping[str, Any]]
"""The request's tools, OpenAI form."""


@dataclass(frozen=True)
class ToolCall:
    """One finished call. `arguments` is JSON text, an object but for odd models."""

    name: str
    arguments: str


Parse = Callable[[str, Tools], list[ToolCall]]
"""(text between the markers, the request's tools) -> calls. Raises `ValueError`: no call."""


Whole = Callable[[TextReader, Tools | None], Reading[None]]
"""(the reply, the request's tools or None where no call is looked for) -> nothing: reports all."""


def _nothing(text: str, tools: Tools) -> list[ToolCall]:
    raise ValueError("this format is read piece by piece")


@dataclass(frozen=True)
class ToolParser:
    """One tool-call format.

    A plain format needs `start`, `end` and `parse`; a call is then reported when it closes. A
    format that gives `scan` reports names and arguments while they are written.
    """

    name: str
    start: str
    """Text that opens a call; nothing from here on is content. Empty: only `starts` open one."""
    end: str
    """Text that closes it; empty: the end of the reply."""
    parse: Parse = _nothing
    """(text between the markers, the request's tools) -> calls. Raises `ValueError`: no call; so
    does text that is nested too deeply for Python (`RecursionError`).

    Whatever else it raises is a fault of the parser: its text is shown as text, and the fault
    is reported with the parser's name.
    """
    detect: Callable[[str], bool] = lambda template: False
    """Whether a chat template speaks this format."""
    scan: Callable[[TextReader, Tools], Reading[None]] | None = None
    """Read one block; the reader stands on its opening marker.

    Raises `NotACall` where the text is not a call: it is then shown as text; what was reported
    of it stays, unfinished. Lets `TextEnded` pass where the reply is cut.
    """
    starts: tuple[str, ...] = ()
    """Further opening markers."""
    ends: tuple[str, ...] = ()
    """Further closing markers."""
    first: tuple[str, ...] = ()
    """Openers that count only where nothing but white space stands before them."""
    markers: tuple[str, ...] = ()
    """Further text that must be readable although it may be special tokens."""
    aliases: tuple[str, ...] = ()
    atomic: bool = False
    """Report a block only once it is whole: for formats that a late fault turns into text."""
    cut: Literal["text", "drop"] = "text"
    """What becomes of a call that the reply's end cuts before anything of it was reported, where
    the request has no tools; with tools it is dropped."""
    after: Literal["keep", "drop"] = "keep"
    """Text after the first block; some formats end a reply there and what follows is noise."""
    whole: Whole | None = None
    """Reads a complete reply, thoughts and answer included, instead of marked blocks in it."""
    rank: int = 0
    """Of several parsers that detect a template, the one with the highest rank is taken."""
    turn_ends: tuple[str, ...] = ()
    """Ends of turns that are no text directly behind a call; models spell them out there."""
    grammar: CallGrammar | None = None
    """How calls are written, for `tool_choice: required` and named tools. `None`: as JSON objects
    of `name` and `arguments` between `start` and `end`. Either way a request whose forced call
    this parser would not read back is refused with status 400."""
    describe: Callable[[Tools], str] | None = None
    """The system message that says which tools there are and how to call them, for a chat template
    that shows none. `None`: their JSON schemas, and an example of `grammar`."""
    fallback: Literal["", "read", "write"] = ""
    """Its part where a chat template shows no known format: to `read` calls of whatever format
    the model chooses, or to be the one that it is made to `write`. By rank, as in detection."""

    def call_grammar(self) -> CallGrammar:
        """How calls are written."""
        if self.grammar is not None:
            return self.grammar
        start = f"{self.start}\n" if self.start else ""
        return CallGrammar.json(start, f"\n{self.end}" if self.end else "")

    def openers(self) -> tuple[str, ...]:
        """Every text that may open a call anywhere in a reply."""
        return tuple(x for x in (self.start, *self.starts) if x)

    def closers(self) -> tuple[str, ...]:
        """Every text that closes a block."""
        return tuple(x for x in (self.end, *self.ends) if x)

    def visible(self) -> tuple[str, ...]:
        """Every text that must be readable although it may be special tokens."""
        found = (*self.openers(), *self.first, *self.closers(), *self.markers)
        return tuple(x for x in found if x)


@dataclass(frozen=True)
class ReasoningParser:
    """How thoughts are marked off from the answer."""

    name: str
    start: str
    end: str
    detect: Callable[[str], bool] = lambda template: False
    """Whether a chat template speaks this format."""
    starts: tuple[str, ...] = ()
    """Further openers."""
    ends: tuple[str, ...] = ()
    """Further closers."""
    unmarked: Literal["wait", "reasoning", "content"] = "wait"
    """What text before any marker is when nobody knows how the prompt ended. `wait`: hold it
    until a marker tells; thoughts if it is a closer, else content."""
    calls: tuple[tuple[str, str], ...] = ()
    """Openers of calls that end a thought even where no tool parser is at work, each with the
    characters that must follow it (after white space); empty: any."""
    prefix: str = ""
    """Text shown before the reply: what the prompt ended with and the client expects to see."""
    header: str = ""
    """Word that the format writes after an opener, before the thoughts, and that is no thought."""
    hidden: tuple[str, ...] = ()
    """Markers around the answer that are no text."""
    unmarked_call: Literal["content", "reasoning"] = "content"
    """With `wait`: what the held text is when a call follows it."""
    aliases: tuple[str, ...] = ()
    whole: Whole | None = None
    """Reads a complete reply; for formats that address every message to a channel."""
    markers: tuple[str, ...] = ()
    """Further text that must be readable although it may be special tokens."""
    rank: int = 0
    """Of several parsers that detect a template, the one with the highest rank is taken."""
    grammar: MessageGrammar | None = None
    """How messages are written, for structured output of a format that addresses every one."""

    def openers(self) -> tuple[str, ...]:
        """Every text that opens a thought."""
        return tuple(x for x in (self.start, *self.starts) if x)

    def closers(self) -> tuple[str, ...]:
        """Every text that closes a thought."""
        return tuple(x for x in (self.end, *self.ends) if x)

    def visible(self) -> tuple[str, ...]:
        """Every text that must be readable although it may be special tokens."""
        found = (*self.openers(), *self.closers(), *self.hidden, *self.markers)
        return tuple(dict.fromkeys(found))
