"""`call:NAME{key:value,...}` with special quotes for strings: Gemma 4 and FunctionGemma."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import (
    Emit,
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claimed,
    through,
)

from .json_text import DEEPEST
from .values import as_json, listed, types

_NAME = re.compile(r"[\w.:/-]*")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BARE = re.compile(r"[^,{}\[\]]*")


@dataclass(frozen=True)
class GemmaFormat:
    start: str
    end: str
    quote: str

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        yield from reader.expect(self.start)
        while True:
            yield from reader.space()
            yield from reader.expect("call:")
            yield from claimed(_Call(self, reader, tools).read(), through(self.end))
            yield from reader.space()
            yield from reader.accept(",")
            yield from reader.space()
            if not (yield from reader.at("call:")):
                break
        yield from reader.accept(self.end)

    def written(self) -> CallGrammar:
        """Keys are bare. Texts are between special quotes and have no escapes."""
        opener = f"{self.start}call:"
        tagged = TaggedArguments(
            "",
            ":",
            "",
            between=",",
            text=(self.quote, self.quote),
            untyped="json",
            barred=(opener,),
        )
        return CallGrammar(f"{opener}{{name}}{{", f"}}{self.end}", tagged=tagged)


@dataclass
class _Call:
    form: GemmaFormat
    reader: TextReader
    tools: Tools
    name: str = ""
    depth: int = 0

    def read(self) -> Reading[None]:
        reader = self.reader
        self.name = yield from reader.run(_NAME)
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            if not (yield from reader.peek()):
                raise TextEnded
            raise NotACall("a call has arguments in braces")
        reader.call(self.name)
        yield from self.items(reader.arguments, "{}", top=True)
        reader.end_call()

    def items(self, emit: Emit, brackets: str, *, top: bool = False) -> Reading[None]:
        reader, opener, closer = self.reader, *brackets
        yield from reader.expect(opener)
        emit(opener)
        before, key = "", ""
        while True:
            yield from reader.space()
            if (yield from reader.accept(closer)):
                emit(closer)
                return
            if opener == "{":
                key = yield from self.key()
                before += json.dumps(key, ensure_ascii=False) + ": "
            emit(before)
            before = ", "
            yield from reader.space()
            yield from self.value(emit, key if top else "")
            yield from self.comma(closer)

    def comma(self, closer: str) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        if not (yield from reader.accept(",")) and not (yield from reader.at(closer)):
            yield from reader.char()
            raise NotACall("expected a comma")

    def key(self) -> Reading[str]:
        reader = self.reader
        quote = yield from reader.at(self.form.quote, '"')
        if quote:
            parts: list[str] = []
            yield from self.quoted(parts.append, quote)
            key = str(json.loads("".join(parts)))
        else:
            key = (yield from reader.until(":")).strip()
        yield from reader.space()
        yield from reader.expect(":")
        return key

    def value(self, emit: Emit, key: str) -> Reading[None]:
        reader = self.reader
        found = yield from reader.at(self.form.quote, "{", "[", '"')
        if found in ("{", "["):
            self.depth += 1
            if self.depth > DEEPEST:
                raise NotACall("nested too deeply")
            yield from self.items(emit, "{}" if found == "{" else "[]")
            self.depth -= 1
        elif found:
            yield from self.quoted(emit, found)
        else:
            text = yield from reader.run(_BARE)
            if not (yield from reader.peek()):
                raise TextEnded
            called = self.tools, self.name, key
            wanted = types(*called) if key else frozenset()
            emit(as_json(text.strip(), wanted, "json", listed(*called) if key else ()))

    def quoted(self, emit: Emit, quote: str) -> Reading[None]:
        reader = self.reader
        reader.skip(len(quote))
        emit('"')

        def piece(text: str) -> None:
            emit(json.dumps(text, ensure_ascii=False)[1:-1])

        # JSON strings have a known end.
        other = "\\" if quote == '"' else self.form.start + "call:"
        while (found := (yield from reader.pass_until((quote, other), piece))) != quote:
            if not found:
                raise TextEnded
            if quote == '"':
                yield from self.escaped(emit)
            else:
                yield from reader.pass_until((self.form.end,), piece)
        reader.skip(len(quote))
        emit('"')

    def escaped(self, emit: Emit) -> Reading[None]:
        """Any backslash that begins no escape of JSON is literal."""
        reader = self.reader
        found = _ESCAPE.match((yield from reader.peek(6)))
        emit(reader.skip(len(found[0])) if found else "\\" + reader.skip(1))


GEMMA4 = GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>")


PARSERS = (
    ToolParser(
        name="gemma4",
        start=GEMMA4.start,
        end=GEMMA4.end,
        scan=GEMMA4.scan,
        markers=(GEMMA4.quote,),
        detect=lambda template: "<|tool_call>" in template,
        rank=3,
        grammar=GEMMA4.written(),
    ),
    ToolParser(
        name="functiongemma",
        start=FUNCTION_GEMMA.start,
        end=FUNCTION_GEMMA.end,
        scan=FUNCTION_GEMMA.scan,
        markers=(FUNCTION_GEMMA.quote,),
        detect=lambda template: "<start_function_call>" in template,
        aliases=("function_gemma",),
        rank=3,
        grammar=FUNCTION_GEMMA.written(),
    ),
)
