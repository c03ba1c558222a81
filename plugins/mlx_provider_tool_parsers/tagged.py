"""Calls as tags: one for the function, one for each parameter, values as text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlx_provider.records import (
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claimed,
    read_json,
    through,
)

from .blocks import JsonBlock
from .json_text import ignore, pass_json
from .values import (
    Arguments,
    Unknown,
    Unreported,
    ValueTags,
    accept_spaced,
    accepts,
    behind,
    properties,
)

_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""")
_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)""")


@dataclass(frozen=True)
class TagFormat:
    """Tags with a name are given without their `>`."""

    blocks: tuple[str, ...] = ("<tool_call>",)
    block_end: str = "</tool_call>"
    call: str = "<function="
    call_end: str = "</function>"
    key: str = "<parameter="
    value_end: str = "</parameter>"
    unknown: Unknown = "string"
    lines: bool = True
    bare: bool = True
    """Calls can occur without a block around them; these need a parameter."""
    undeclared: bool = True
    """A name that is not among the request's tools is a call."""
    forgiving: bool = True
    """The closing tag of a parameter can be missing before the next declared one."""

    @property
    def openers(self) -> tuple[str, ...]:
        return (*self.blocks, self.call) if self.bare else self.blocks

    @property
    def traps(self) -> tuple[str, ...]:
        """Texts besides the closing tag that are not text of a value."""
        return (self.call, self.key) if self.forgiving else (self.call,)

    @property
    def values(self) -> ValueTags:
        opener = self.value_end.replace("</", "<").removesuffix(">")
        calls = (*self.blocks, self.call)
        return ValueTags(opener, self.value_end, self.key, self.call_end, self.block_end, calls)

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        return _TagReader(self, reader, tools).block()


def header_name(header: str) -> str:
    if header.startswith("="):
        return header[1:].strip().strip("\"'")
    match = _NAME.search(header)
    return next((x for x in match.groups() if x is not None), "").strip() if match else ""


def read_call(form: TagFormat, reader: TextReader, tools: Tools) -> Reading[None]:
    return _TagReader(form, reader, tools).call(wrapped=True)


@dataclass
class _TagReader:
    form: TagFormat
    reader: TextReader
    tools: Tools

    def block(self) -> Reading[None]:
        form, reader = self.form, self.reader
        opener = yield from reader.at(*form.blocks)
        wrapped = bool(reader.skip(len(opener)))
        yield from reader.space()
        if wrapped and (yield from reader.at("{", "[")):
            known = None if form.undeclared else accepts(self.tools)
            yield from JsonBlock((), form.block_end, known=known).between(reader)
            return
        while True:
            yield from reader.space()
            if not (yield from reader.at(form.call)):
                break
            if not wrapped:
                yield from self.call(wrapped)
                break
            yield from claimed(self.call(wrapped), through(form.block_end))
        closed = bool(form.block_end and (yield from accept_spaced(reader, form.block_end)))
        if not self.found:
            yield from self.nothing_found(closed)

    def nothing_found(self, closed: bool) -> Reading[None]:
        form, reader = self.form, self.reader
        following = yield from reader.peek()
        if not closed and not following:
            raise TextEnded
        broken = following == "<" and not closed and not (yield from reader.at(*form.blocks))
        rest = through(form.block_end) if broken and form.block_end else None
        raise NotACall("a block without a call", rest=rest)

    found: bool = False

    def call(self, wrapped: bool) -> Reading[None]:
        form, reader = self.form, self.reader
        yield from reader.expect(form.call.removesuffix("="))
        header = yield from self.header()
        name = header_name(header)
        if not name and (yield from self.unnamed()):
            return
        if not name:
            raise NotACall("a call has a name")
        known = form.undeclared or accepts(self.tools)(name)
        report = reader if known else Unreported()
        arguments = Arguments(report, self.tools, name, form.unknown, form.lines)
        yield from reader.space()
        if (yield from reader.at("{")):
            yield from claimed(self.json_body(arguments), through(form.call_end))
        else:
            yield from self.parameters(arguments, wrapped)
        if not known:
            raise NotACall("no such tool", whole=True)
        self.found = True

    def unnamed(self) -> Reading[bool]:
        """A call whose name is in a JSON object: `<invoke>{...}`."""
        form, reader = self.form, self.reader
        yield from reader.space()
        if not (yield from reader.at("{")):
            return False
        known = None if form.undeclared else accepts(self.tools)
        yield from JsonBlock((), form.call_end, known=known).between(reader)
        self.found = True
        return True

    def header(self) -> Reading[str]:
        header = yield from self.reader.until(">")
        self.reader.skip(1)
        return header

    def json_body(self, arguments: Arguments) -> Reading[None]:
        """`<function=name>{...}</function>`."""
        arguments.begin()
        yield from read_json(self.reader, arguments.report.arguments)
        arguments.report.end_call()
        yield from self.reader.space()
        yield from self.reader.accept(self.form.call_end)

    def parameters(self, arguments: Arguments, wrapped: bool) -> Reading[None]:
        form, reader = self.form, self.reader
        while True:
            yield from reader.space()
            tags = tuple(x for x in (form.key, form.call_end, form.block_end) if x)
            found = yield from reader.at(*tags)
            if not found and wrapped:
                found = yield from reader.pass_until(tags, ignore)
            if not found and not (yield from reader.peek()):
                raise TextEnded
            if found == form.key:
                end = form.block_end if wrapped and form.block_end else form.call_end
                yield from claimed(self.parameter(arguments), through(end))
                continue
            if found and (wrapped or arguments.keys):
                reader.skip(len(found) if found == form.call_end else 0)
                arguments.end()
                return
            raise NotACall("a call without a block has parameters")

    def parameter(self, arguments: Arguments) -> Reading[None]:
        form, reader = self.form, self.reader
        yield from reader.expect(form.key.removesuffix("="))
        header = yield from self.header()
        key = header_name(header)
        if not key:
            raise NotACall("a parameter without a name")
        if key in arguments.keys:
            raise NotACall("twice the same parameter")
        marked = _STRING.search(header)
        string = None if marked is None else marked.group(1) == "true"
        bracket = yield from behind(reader, "", "{", "[")
        arguments.open(key, string, bracket=bool(bracket))
        yield from self.value(arguments)
        arguments.close(force_json=string is False)

    def value(self, arguments: Arguments) -> Reading[None]:
        """Read up to the closing tag. Closing tags of opening tags in the value are text, and those
        that the end of the call does not follow."""
        form, reader, values = self.form, self.reader, self.form.values
        if not arguments.is_text:
            arguments.piece((yield from pass_json(reader, form.value_end)))
        ends = [form.value_end, values.opener, form.call]
        if form.forgiving:
            ends += ["\n" + form.key, form.call_end]
        depth = 0
        while True:
            found = yield from reader.pass_until(ends, arguments.piece)
            if not found:
                raise TextEnded
            if found == form.value_end:
                if (yield from values.closes(reader, depth, arguments.repeats)):
                    return
                depth = max(0, depth - 1)
            elif found == form.call:
                yield from self.quoted_call(arguments)
                continue
            elif found == form.call_end:
                if (yield from self.ends_reply(len(found))):
                    return
            elif found != values.opener and (yield from self.next_declared(arguments)):
                return
            else:
                depth += 1
            arguments.piece(reader.skip(len(found)))

    def quoted_call(self, arguments: Arguments) -> Reading[None]:
        """Pass a whole call inside a value as text; its closing tags do not close the value."""
        form, reader = self.form, self.reader
        mark = reader.mark()
        reader.skip(len(form.call.removesuffix("=")))
        yield from self.short_header()
        yield from reader.space()
        found = yield from reader.at(form.key)
        reader.rewind(mark)
        arguments.piece(reader.skip(len(form.call)))
        if found:
            yield from reader.pass_until((form.call_end,), arguments.piece)

    def short_header(self) -> Reading[str]:
        """The inside of a tag up to its end, or the beginning of text that is not a tag."""
        reader, header = self.reader, ""
        while not header.endswith(">") and len(header) < 128 and (yield from reader.peek()):
            header += yield from reader.char()
        return header.removesuffix(">")

    def ends_reply(self, size: int) -> Reading[bool]:
        """Whether a function's closing tag inside an unclosed value closes the last block."""
        reader = self.reader
        mark = reader.mark()
        reader.skip(size)
        yield from reader.space()
        if self.form.block_end:
            yield from reader.accept(self.form.block_end)
            yield from reader.space()
        ended = not (yield from reader.peek())
        reader.rewind(mark)
        return ended

    def next_declared(self, arguments: Arguments) -> Reading[bool]:
        """Whether a parameter tag at a line's beginning opens the next declared parameter, and the
        closing tag before it is missing."""
        form, reader = self.form, self.reader
        mark = reader.mark()
        reader.skip(len("\n" + form.key.removesuffix("=")))
        header = yield from self.short_header()
        reader.rewind(mark)
        key = "" if header[:1] == "=" and form.key[-1:] != "=" else header_name(header)
        if key not in properties(self.tools, arguments.name) or key in arguments.keys:
            return False
        mark = reader.mark()
        quoted = yield from form.values.is_left_over(reader)
        reader.rewind(mark)
        return not quoted
