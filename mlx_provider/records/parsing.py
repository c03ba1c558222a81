"""Tool parsers and reasoning parsers: how a model family writes calls and thoughts."""

from __future__ import annotations

import hashlib
import json
import keyword
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .json_reading import listed_parameters, resolve, value_types
from .reading import Reading, TextReader

SHORT_ID = 9
Tools = Sequence[Mapping[str, Any]]
"""The request's tools, OpenAI form."""
_LETTERS = string.ascii_letters + string.digits


def short_id(call_id: str) -> str:
    """Nine letters and digits: the id itself if it has that form, else a digest of it."""
    if len(call_id) == SHORT_ID and all(character in _LETTERS for character in call_id):
        return call_id
    digest = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest())
    return "".join(_LETTERS[digest // 62**place % 62] for place in range(SHORT_ID))


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments written one by one: `key_before KEY key_after VALUE value_after`. In `value_after`,
    `{key}` stands for the parameter's name."""

    key_before: str
    key_after: str
    value_after: str
    between: str = ""
    """Text between two arguments."""
    quotes: tuple[str, str] | None = ("", "")
    """Text before and after a text value; `None`: it is a JSON string."""
    text_key_after: str = ""
    """`key_after` of a text value, if it differs."""
    untyped: Literal["text", "json"] = "text"
    """How a value without a type in its schema is written."""
    barred: tuple[str, ...] = ()
    """Text that no text value may contain, because the parser would not read it as text. What
    closes a value is always barred."""
    keywords: bool = False
    """Parameters must be valid Python argument names; a tool with others takes one JSON object."""

    @property
    def marks_text(self) -> bool:
        """Whether the marks of a value (`quotes`, `text_key_after`) show that it is text."""
        return bool(self.text_key_after) or self.quotes not in (None, ("", ""))

    def may_be_text(self, schema: Any, root: Mapping[str, Any]) -> bool:
        """Whether a value of this schema (references within `root`) may be text without JSON."""
        types = value_types(schema, root)
        if self.quotes is None:
            return False
        return "string" in types or (not types and self.untyped == "text")

    def takes_keys(self, keys: Iterable[str]) -> bool:
        """False: a call with these keys has one JSON object."""
        return not self.keywords or all(
            key.isidentifier() and key.isascii() and not keyword.iskeyword(key) for key in keys
        )

    def write(self, key: str, value: Any, schema: Any, root: Mapping[str, Any]) -> str:
        """The text of one argument. For a parameter that may be text, a text value is written
        without JSON; if the format has no marks of text, other values get the same `quotes`."""
        is_text = isinstance(value, str)
        bare = self.may_be_text(schema, root) and (is_text or not self.marks_text)
        written = value if bare and is_text else json.dumps(value, ensure_ascii=False)
        before, after = (self.quotes if bare else None) or ("", "")
        key_after = (bare and self.text_key_after) or self.key_after
        value_after = self.value_after.replace("{key}", key)
        return f"{self.key_before}{key}{key_after}{before}{written}{after}{value_after}"


@dataclass(frozen=True)
class CallGrammar:
    """How one format writes calls: `open before ARGUMENTS after [between before ...] close`. In
    `before`, `{name}` stands for the tool's name and `{digits}` for a number. In `before` or
    `after`, `{id}` stands for the call's id: nine letters and digits."""

    before: str
    after: str
    open: str = ""
    close: str = ""
    between: str | None = ""
    """Text between two calls; `None`: the format has one call per reply."""
    tagged: TaggedArguments | None = None
    """`None`: the arguments are one JSON object."""

    @classmethod
    def json(
        cls, start: str, end: str, key: str = "arguments", between: str | None = "\n"
    ) -> CallGrammar:
        """The grammar of `{"name": NAME, key: ARGUMENTS}` between the markers `start` and `end`. If
        `end` is empty, nothing separates two calls, so there is one per reply."""
        before = f'{start}{{"name": "{{name}}", "{key}": '
        return cls(before, f"}}{end}", between=between if end else None)

    @classmethod
    def json_list(cls, start: str, end: str) -> CallGrammar:
        """The grammar of a JSON list of such objects between two markers."""
        call = cls.json("", "")
        return cls(call.before, call.after, f"{start}[", f"]{end}", between=", ")

    def write(self, name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        """The text of one call. `schema`: the tool's parameters, which decide what is text."""
        return self.write_all([(name, arguments, schema)])

    def write_all(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]],
        ids: Sequence[str] = (),
    ) -> str:
        """The text of `calls` (name, arguments and schema of each); `ids` are made up if there are
        none. If the format has one call per reply, each call is on a line of its own."""
        texts = []
        for number, (name, arguments, schema) in enumerate(calls):
            call_id = short_id(ids[number] if ids else str(number))
            before, after = self.frame(number, call_id, name)
            texts.append(before + self._write_arguments(arguments, schema) + after)
        if self.between is None:
            return "\n".join(f"{self.open}{text}{self.close}" for text in texts)
        return self.open + self.between.join(texts) + self.close

    def frame(self, number: int, call_id: str, name: str) -> tuple[str, str]:
        """The texts before and after the arguments of a call, which is the `number`th."""
        before = self.before.replace("{digits}", str(number)).replace("{id}", call_id)
        return before.replace("{name}", self.name_text(name)), self.after.replace("{id}", call_id)

    def name_text(self, name: str) -> str:
        """A tool's name as `before` has it: escaped if it is a JSON string there."""
        quoted = '"{name}"' in self.before
        return json.dumps(name, ensure_ascii=False)[1:-1] if quoted else name

    def _write_arguments(self, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
        tags, known = self.tagged, listed_parameters(schema)[0]
        if tags is None or not tags.takes_keys(known):
            return json.dumps(arguments, ensure_ascii=False)
        return tags.between.join(
            tags.write(key, value, resolve(known.get(key), schema), schema)
            for key, value in arguments.items()
        )


@dataclass(frozen=True)
class MessageGrammar:
    """How a format with an address on every message opens the message of a thought (`thought`) or
    of the answer (`answer`), and ends a thought."""

    thought: str
    thought_end: str
    next: str
    """Opens the message after a thought."""
    answer: str


@dataclass(frozen=True)
class ToolCall:
    """A finished call. `arguments` is JSON text, normally an object."""

    name: str
    arguments: str


Parse = Callable[[str, Tools], list[ToolCall]]
"""(text between the markers, the request's tools) -> calls. Raises `ValueError`: no call."""
Whole = Callable[[TextReader, Tools | None], Reading[None]]
"""(reply, tools of the request, or `None`: look for no calls) -> nothing. Reports everything."""


def _nothing(text: str, tools: Tools) -> list[ToolCall]:
    raise ValueError("this format is read piece by piece")


@dataclass(frozen=True)
class ToolParser:
    """A tool-call format. A plain one has `start`, `end` and `parse`; a call is reported when it
    closes. One with `scan` reports names and arguments while they are written."""

    name: str
    start: str
    """Text that opens a call and is no content. Empty: only `starts` open one."""
    end: str
    """Text that closes it; empty: the end of the reply."""
    parse: Parse = _nothing
    """`ValueError`, or `RecursionError` for deep nesting: no call. Others: a parser's fault."""
    detect: Callable[[str], bool] = lambda template: False
    """Whether a chat template uses this format."""
    scan: Callable[[TextReader, Tools], Reading[None]] | None = None
    """Read one block; the reader is at its opening marker. Raises `NotACall` for text, which is
    shown; what was already reported stays, unfinished. Does not catch `TextEnded`."""
    starts: tuple[str, ...] = ()
    """Further opening markers."""
    ends: tuple[str, ...] = ()
    """Further closing markers."""
    first: tuple[str, ...] = ()
    """Openers that count only at the beginning of a reply, after white space."""
    markers: tuple[str, ...] = ()
    """Further text that is decoded even if it is special tokens."""
    aliases: tuple[str, ...] = ()
    atomic: bool = False
    """Report a call only when it is complete, for formats in which a late fault makes it text."""
    cut: Literal["text", "drop"] = "text"
    """For a request without tools: a call that is cut before anything was reported becomes text, or
    is dropped. With tools it is dropped."""
    after: Literal["keep", "drop"] = "keep"
    """Text after the first block; in some formats the reply ends there."""
    whole: Whole | None = None
    """Reads a complete reply with thoughts and answer, not only marked blocks."""
    rank: int = 0
    """The highest rank of those that detect a template wins."""
    turn_ends: tuple[str, ...] = ()
    """Ends of turns that are no text directly after a call."""
    grammar: CallGrammar | None = None
    """How calls are written, for `tool_choice: required` and named tools. `None`: JSON objects with
    `name` and `arguments` between `start` and `end`. A request with a forced call that this parser
    could not read is refused with status 400."""
    describe: Callable[[Tools], str] | None = None
    """The system message with the tools and the way to call them, for a chat template that shows
    none. `None`: their JSON schemas, and an example of `grammar`."""
    fallback: Literal["", "read", "write"] = ""
    """Its use if a chat template shows no known format: to `read` calls in any format, or as the
    format that the model must `write`. The highest rank wins."""

    def call_grammar(self) -> CallGrammar:
        """`grammar`, or its default."""
        if self.grammar is not None:
            return self.grammar
        start = f"{self.start}\n" if self.start else ""
        return CallGrammar.json(start, f"\n{self.end}" if self.end else "")

    def openers(self) -> tuple[str, ...]:
        return tuple(x for x in (self.start, *self.starts) if x)

    def closers(self) -> tuple[str, ...]:
        return tuple(x for x in (self.end, *self.ends) if x)

    def visible(self) -> tuple[str, ...]:
        """All markers: these texts are decoded even if they are special tokens."""
        found = (*self.openers(), *self.first, *self.closers(), *self.markers)
        return tuple(x for x in found if x)


@dataclass(frozen=True)
class ReasoningParser:
    """A format of thoughts."""

    name: str
    start: str
    end: str
    detect: Callable[[str], bool] = lambda template: False
    """Whether a chat template uses this format."""
    starts: tuple[str, ...] = ()
    """Further openers."""
    ends: tuple[str, ...] = ()
    """Further closers."""
    unmarked: Literal["wait", "reasoning", "content"] = "wait"
    """Meaning of text before any marker if the prompt's end is unknown. `wait`: hold it until a
    marker; it is thoughts if that is a closer, else content."""
    calls: tuple[tuple[str, str], ...] = ()
    """Openers of calls that end a thought even without a tool parser, each with the characters that
    must follow it (after white space); empty: any."""
    prefix: str = ""
    """Text shown before the reply: the prompt's end that the client expects to see."""
    header: str = ""
    """A word after an opener that is no part of the thoughts."""
    hidden: tuple[str, ...] = ()
    """Markers around the answer, which are not shown."""
    unmarked_call: Literal["content", "reasoning"] = "content"
    """With `wait`: meaning of the held text if a call follows."""
    aliases: tuple[str, ...] = ()
    whole: Whole | None = None
    """Reads a complete reply, for formats with an address on every message."""
    markers: tuple[str, ...] = ()
    """Further text that is decoded even if it is special tokens."""
    rank: int = 0
    """If several parsers detect a template, the highest rank wins."""
    grammar: MessageGrammar | None = None
    """How messages are written, for structured output in a format with an address on each."""

    def openers(self) -> tuple[str, ...]:
        return tuple(x for x in (self.start, *self.starts) if x)

    def closers(self) -> tuple[str, ...]:
        return tuple(x for x in (self.end, *self.ends) if x)

    def visible(self) -> tuple[str, ...]:
        found = (*self.openers(), *self.closers(), *self.hidden, *self.markers)
        return tuple(dict.fromkeys(found))
