"""Calls as tags, with values as text: one tag for the function and one for each parameter
(`<function=NAME><parameter=KEY>value</parameter></function>`), or a name and pairs of tags
(`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`)."""

import re
from dataclasses import dataclass
from typing import Literal

from mlx_provider.records import (
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claim,
    read_json,
    show_through,
)

from .json_text import JsonBlock, ignore, read_json_before
from .values import Arguments, Unknown, accept_spaced, accepts, behind, properties

_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""")
_BARE_NAME = re.compile(r"[\w.:/-]*")
_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)""")
_LONGEST_TAG = 128  # characters


@dataclass(frozen=True)
class TagFormat:
    """The tags of one format. Those with a name inside are given without their `>`."""

    blocks: tuple[str, ...] = ("<tool_call>",)
    block_end: str = "</tool_call>"
    call: str = "<function="
    call_end: str = "</function>"
    separator: str = ""
    """Tag after the tool's name, if the name follows `call`; a model may omit it."""
    key: str = "<parameter="
    key_end: str = ""
    """Empty: tags contain the names. Else the tool's name follows `call`, and this ends a key."""
    value: str = ""
    """Tag before a value, if there is a `key_end`."""
    value_end: str = "</parameter>"
    untyped_values: Unknown = "string"
    value_on_own_lines: bool = True
    """Line ends directly inside the tags of a value belong to the tags."""
    allow_bare_calls: bool = True
    """Calls can stand without a block around them. If tags contain names, they need a parameter."""
    undeclared_call: Literal["call", "text", "nothing"] = "call"
    """What is reported for a call of a tool that the request does not have."""
    close_tag_optional: bool = True
    """The closing tag of a parameter can be missing before the next declared one."""

    @property
    def barred_in_values(self) -> tuple[str, ...]:
        """Texts, besides the closing tag, that no value may contain."""
        return (self.call, self.key) if self.close_tag_optional else (self.call,)

    @property
    def value_start(self) -> str:
        """Prefix of an opening tag of values, such as `<parameter`."""
        return self.value_end.replace("</", "<").removesuffix(">")

    @property
    def malformed_end(self) -> str:
        """Where the text of a malformed call in a block ends."""
        return self.call_end if self.key_end else self.block_end

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read one block, or one call without a block. Raises `NotACall`."""
        return _TagReader(self, reader, tools).read_block()


def header_name(header: str) -> str:
    """The name in the text of a tag after its first word, `=NAME` or `name="NAME"`; empty: none."""
    if header.startswith("="):
        return header[1:].strip().strip("\"'")
    match = _NAME.search(header)
    return next((x for x in match.groups() if x is not None), "").strip() if match else ""


@dataclass
class _TagReader:
    """Reads one block of `form`, or one call without a block."""

    form: TagFormat
    reader: TextReader
    tools: Tools
    has_call: bool = False

    def read_block(self) -> Reading[None]:
        form, reader = self.form, self.reader
        opener = yield from reader.at(*form.blocks)
        wrapped = bool(reader.skip(len(opener)))
        yield from reader.space()
        if wrapped and (yield from reader.at("{", "[")):
            yield from self.read_json_calls(form.block_end)
            return
        while True:
            yield from reader.space()
            if not (yield from reader.at(form.call)):
                break
            if not wrapped:
                yield from self.read_call(wrapped)
                break
            yield from claim(self.read_call(wrapped), show_through(form.malformed_end))
        closed = bool(form.block_end and (yield from accept_spaced(reader, form.block_end)))
        if not self.has_call:
            yield from self.raise_failure(closed)

    def raise_failure(self, closed: bool) -> Reading[None]:
        """The block has no call: raise `TextEnded` if the reply ends here, else `NotACall`."""
        form, reader = self.form, self.reader
        following = yield from reader.peek()
        if not closed and not following:
            raise TextEnded
        broken = following == "<" and not closed and not (yield from reader.at(*form.blocks))
        then = show_through(form.block_end) if broken and form.block_end else None
        raise NotACall("a block without a call", then=then)

    def read_json_calls(self, end: str) -> Reading[None]:
        known = bool if self.form.undeclared_call == "call" else accepts(self.tools)
        yield from JsonBlock((), end, known=known).read_calls(self.reader)

    def read_call(self, wrapped: bool) -> Reading[None]:
        """Read one call. `wrapped`: it stands in a block."""
        form, reader = self.form, self.reader
        name = yield from self.read_name()
        if not name:
            yield from reader.space()
            if not (yield from reader.at("{", "[")):
                raise NotACall("a call has a name")
            yield from self.read_json_calls(form.call_end)
            self.has_call = True
            return
        known = form.undeclared_call == "call" or accepts(self.tools)(name)
        report = reader if known else TextReader()  # the latter's events go nowhere
        unknown, lines = form.untyped_values, form.value_on_own_lines
        arguments = Arguments(report, self.tools, name, unknown, lines)
        yield from reader.space()
        if (yield from reader.at("{")):
            yield from claim(self.read_json_body(arguments), show_through(form.call_end))
        else:
            reading = self.read_parameters(arguments, wrapped)
            yield from claim(reading, show_through(form.call_end)) if form.key_end else reading
        if not known and form.undeclared_call == "text":
            raise NotACall("no such tool", whole=True)
        self.has_call = True

    def read_name(self) -> Reading[str]:
        """Read the tool's name; empty: there is none, as before a call in JSON."""
        form, reader = self.form, self.reader
        yield from reader.expect(form.call.removesuffix("="))
        if not form.key_end:
            return header_name((yield from self.read_header()))
        yield from reader.space()
        if (yield from reader.at("{", "[")):
            return ""
        name = yield from reader.run(_BARE_NAME)
        yield from reader.space()
        following = yield from reader.peek()
        if not following:
            raise TextEnded
        if not name or following not in ("<", "{"):
            raise NotACall("not a name")
        if form.separator:
            yield from reader.accept(form.separator)
        return name

    def read_header(self) -> Reading[str]:
        header = yield from self.reader.until(">")
        self.reader.skip(1)
        return header

    def read_json_body(self, arguments: Arguments) -> Reading[None]:
        arguments.begin()
        yield from read_json(self.reader, arguments.report.arguments)
        arguments.report.end_call()
        yield from self.reader.space()
        yield from self.reader.accept(self.form.call_end)

    def read_parameters(self, arguments: Arguments, wrapped: bool) -> Reading[None]:
        form, reader = self.form, self.reader
        while True:
            yield from reader.space()
            tags = tuple(x for x in (form.key, form.call_end, form.block_end) if x)
            found = yield from reader.at(*tags)
            if not found and wrapped and not form.key_end:
                found = yield from reader.pass_until(tags, ignore)
            if not found and not (yield from reader.peek()):
                raise TextEnded
            if found == form.key:
                end = form.malformed_end if wrapped else form.call_end
                yield from claim(self.read_parameter(arguments), show_through(end))
                continue
            if found and (wrapped or form.key_end or arguments.keys):
                reader.skip(len(found) if found == form.call_end else 0)
                arguments.end()
                return
            raise NotACall("no parameter")

    def read_parameter(self, arguments: Arguments) -> Reading[None]:
        key, header = yield from self.read_key()
        if not key:
            raise NotACall("a parameter without a name")
        marked = _STRING.search(header)
        string = None if marked is None else marked.group(1) == "true"
        bracket = yield from behind(self.reader, "", "{", "[")
        arguments.open(key, string, bracket=bool(bracket))
        yield from self.read_value(arguments)
        arguments.close(force_json=string is False)

    def read_key(self) -> Reading[tuple[str, str]]:
        """Read up to a parameter's value. Returns its name, and the rest of the text in its tag."""
        form, reader = self.form, self.reader
        yield from reader.expect(form.key.removesuffix("="))
        if not form.key_end:
            header = yield from self.read_header()
            return header_name(header), header
        key = (yield from reader.until(form.key_end)).strip()
        reader.skip(len(form.key_end))
        yield from reader.space()
        yield from reader.expect(form.value)
        return key, ""

    # ---- where a value ends: the text after a closing tag decides

    def read_value(self, arguments: Arguments) -> Reading[None]:
        """Read a value and its closing tag. A closing tag is text of the value if it closes an
        opening tag in the value, or if the call does not go on after it."""
        form, reader = self.form, self.reader
        if not arguments.is_text:
            arguments.piece((yield from read_json_before(reader, form.value_end)))
        ends = [form.value_end, form.value_start, form.call]
        if form.close_tag_optional:
            ends += ["\n" + form.key, form.call_end]
        depth = 0
        while True:
            found = yield from reader.pass_until(ends, arguments.piece)
            if not found:
                raise TextEnded
            if found == form.value_end:
                if (yield from self.value_ends(arguments, depth)):
                    return
                depth = max(0, depth - 1)
            elif found == form.call:
                yield from self.read_quoted_call(arguments)
                continue
            elif found == form.call_end:
                if (yield from self.ends_reply(len(found))):
                    return
            elif found != form.value_start and (yield from self.next_declared(arguments)):
                return
            else:
                depth += 1
            arguments.piece(reader.skip(len(found)))

    def value_ends(self, arguments: Arguments, depth: int) -> Reading[bool]:
        """Read the closing tag that begins here, if it ends the value; false: nothing was read.
        `depth`: number of tags in the value that are still open. `Arguments.repeats` decides on two
        closing tags in a row. Raises `NotACall` if either of them can be the end."""
        form, reader, repeats = self.form, self.reader, arguments.repeats
        start = reader.mark()
        reader.skip(len(form.value_end))
        space = yield from reader.space()
        while repeated := (yield from reader.at(form.value_end)):
            if depth or repeats == "text":
                break
            if repeats == "apart" and not space:
                raise NotACall("a closing tag stands twice")
            reader.skip(len(repeated))
            space = yield from reader.space()
        end = reader.mark()
        closed = not repeated and (yield from self.call_goes_on(arguments, depth))
        reader.rewind(end)
        if closed:
            reader.drop_mark()
        else:
            reader.rewind(start)
        return closed

    def call_goes_on(self, arguments: Arguments, depth: int) -> Reading[bool]:
        """Whether what follows a closing tag shows that the value has ended: a parameter, or the
        end of the call or of the reply. In doubt, no later closing tag may be left over: if the
        parameter follows open tags or repeats a name, or if other text follows the call."""
        form, reader = self.form, self.reader
        found = yield from reader.at(*filter(None, (form.key, form.call_end, form.block_end)))
        if not found:
            return not (yield from reader.peek())
        if found == form.key:
            doubtful = depth or (yield from self.next_key()) in arguments.keys
            return not doubtful or not (yield from self.leaves_closer())
        for tag in filter(None, (form.call_end, form.block_end)):
            yield from reader.accept(tag)
            yield from reader.space()
        if not (yield from reader.peek()) or (yield from reader.at(*form.blocks, form.call)):
            return True
        return not (yield from self.leaves_closer(to_end=True))

    def leaves_closer(self, *, to_end: bool = False) -> Reading[bool]:
        """Whether a closing tag without an opening one follows before the end of the call, or with
        `to_end` of the reply. Reads up to there."""
        form, reader, depth = self.form, self.reader, 0
        wanted = (form.value_start, form.value_end, *([] if to_end else [form.call_end]))
        while found := (yield from reader.pass_until(wanted, ignore)):
            reader.skip(len(found))
            if found == form.value_start:
                depth += 1
            elif found == form.value_end:
                if not depth:
                    return True
                depth -= 1
            else:
                yield from reader.space()
                ends = tuple(filter(None, (form.block_end, *form.blocks, form.call)))
                if (yield from reader.at(*ends)) or not (yield from reader.peek()):
                    return False
        return False

    def read_quoted_call(self, arguments: Arguments) -> Reading[None]:
        """Read a call inside a value as text, so that its closing tags do not end the value."""
        form, reader = self.form, self.reader
        mark = reader.mark()
        reader.skip(len(form.call.removesuffix("=")))
        if form.key_end:
            yield from reader.run(_BARE_NAME)
            yield from reader.space()
            yield from reader.accept(*filter(None, (form.separator,)))
        else:
            yield from self.read_short_header()
        yield from reader.space()
        found = yield from reader.at(form.key)
        reader.rewind(mark)
        arguments.piece(reader.skip(len(form.call)))
        if found:
            yield from reader.pass_until((form.call_end,), arguments.piece)

    def read_short_header(self) -> Reading[str]:
        """Read the rest of a tag, at most `_LONGEST_TAG` characters. Returns it without its `>`."""
        reader, header = self.reader, ""
        while (
            not header.endswith(">") and len(header) < _LONGEST_TAG and (yield from reader.peek())
        ):
            header += yield from reader.char()
        return header.removesuffix(">")

    def next_key(self) -> Reading[str]:
        """The name of the parameter that begins here; empty: none. Reads nothing."""
        form, reader = self.form, self.reader
        mark = reader.mark()
        reader.skip(len(form.key.removesuffix("=")))
        header = yield from self.read_short_header()
        reader.rewind(mark)
        if form.key_end:
            return (header + ">").partition(form.key_end)[0].strip()
        if header.startswith("=") and not form.key.endswith("="):
            return ""  # a tag of another format
        return header_name(header)

    def ends_reply(self, size: int) -> Reading[bool]:
        """Whether the reply ends after the call's closing tag here (`size` characters) and the
        block's. Then the tag also ends the value before it. Reads nothing."""
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
        """Whether the tag at the beginning of the next line opens another declared parameter, and
        the closing tag before it is missing. Reads nothing."""
        reader = self.reader
        mark = reader.mark()
        reader.skip(1)
        key = yield from self.next_key()
        known = key in properties(self.tools, arguments.name) and key not in arguments.keys
        known = known and not (yield from self.leaves_closer())
        reader.rewind(mark)
        return known
