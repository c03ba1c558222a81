"""`call:NAME{key:value,...}` with special quotes for strings: Gemma 4 and FunctionGemma."""

import json
import re
from dataclasses import dataclass
from typing import ClassVar

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import (
    Emit,
    JsonReader,
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claim,
    show_through,
)

from .json_text import identity
from .values import as_json, enum_values, types

_NAME = re.compile(r"[\w.:/-]*")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BARE = re.compile(r"[^,{}\[\]]*")
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class GemmaFormat:
    """`{start}call:NAME{key:value,...}{end}`, with `quote` before and after strings."""

    start: str
    end: str
    quote: str

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read `start`, one or more calls, and `end`, which may be missing. Raises `NotACall`."""
        yield from reader.expect(self.start)
        yield from reader.space()
        while True:
            yield from reader.expect("call:")
            yield from claim(self._call(reader, tools), show_through(self.end))
            yield from reader.run(_BETWEEN)
            if not (yield from reader.at("call:")):
                break
        yield from reader.accept(self.end)

    def _call(self, reader: TextReader, tools: Tools) -> Reading[None]:
        name = yield from reader.run(_NAME)
        yield from reader.space()
        first = yield from reader.peek()
        if first != "{":
            raise NotACall("a call has arguments in braces") if first else TextEnded()
        if not name:
            raise NotACall("a call has a name")
        reader.call(name)
        yield from _Arguments(
            reader, reader.arguments, quotes=(self.quote, '"'), form=self, tools=tools, name=name
        ).value()
        reader.end_call()

    def parser(self, name: str, aliases: str = "") -> ToolParser:
        """The `ToolParser` of this format. `aliases`: names with spaces between them."""
        opener = f"{self.start}call:"
        quotes = (self.quote, self.quote)
        tagged = TaggedArguments(
            "", ":", "", between=",", quotes=quotes, untyped="json", barred=(opener,)
        )
        return ToolParser(
            start=self.start,
            end=self.end,
            scan=self.scan,
            markers=(self.quote,),
            grammar=CallGrammar(f"{opener}{{name}}{{", f"}}{self.end}", tagged=tagged),
            **identity(name, (self.start,), aliases=aliases, rank=3),
        )


@dataclass(kw_only=True)
class _Arguments(JsonReader):
    """Reads arguments and emits them as JSON. Strings between special quotes have no escapes."""

    form: GemmaFormat
    tools: Tools
    name: str  # of the tool
    comma: ClassVar[str] = ", "
    colon: ClassVar[str] = ": "

    def space(self) -> Reading[str]:
        yield from self.reader.space()
        return ""

    def key(self, before: str) -> Reading[str]:
        reader = self.reader
        parts: list[str] = []
        quote = yield from reader.at(*self.quotes)
        if quote:
            yield from self.string(quote, parts.append)
        else:
            parts.append(json.dumps((yield from reader.until(":")).strip(), ensure_ascii=False))
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        self.emit(before + "".join(parts) + self.colon)
        return str(json.loads("".join(parts)))

    def scalar(self, key: str) -> Reading[None]:
        text = yield from self.reader.run(_BARE)
        if not (yield from self.reader.peek()):
            raise TextEnded
        parameter = self.tools, self.name, key if self.depth == 1 else ""
        self.emit(as_json(text.strip(), types(*parameter), "json", enum_values(*parameter)))

    def string(self, quote: str, emit: Emit) -> Reading[None]:
        reader = self.reader
        reader.skip(len(quote))
        emit('"')

        def piece(text: str) -> None:
            emit(json.dumps(text, ensure_ascii=False)[1:-1])

        # a JSON string has escapes; a string between special quotes may contain a whole call
        inside = "\\" if quote == '"' else self.form.start + "call:"
        while (found := (yield from reader.pass_until((quote, inside), piece))) != quote:
            if not found:
                raise TextEnded
            if quote != '"':  # the quotes in the contained call do not end the string
                yield from reader.pass_until((self.form.end,), piece)
            elif escape := _ESCAPE.match((yield from reader.peek(6))):
                emit(reader.skip(len(escape[0])))
            else:
                emit("\\" + reader.skip(1))  # a backslash that begins no escape gets one before it
        reader.skip(len(quote))
        emit('"')


PARSERS = (
    GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>').parser("gemma4"),
    GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>").parser(
        "functiongemma", "function_gemma"
    ),
)
