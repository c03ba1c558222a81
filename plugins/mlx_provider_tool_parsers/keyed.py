"""Calls whose arguments have keys of their own: `NAME<arg_key>K</arg_key><arg_value>V</arg_value>`
(GLM 4.5 to 4.7, Poolside, Hunyuan V3), and Apertus, a list of objects in which the tool's name is
the key of its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
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
from .json_text import pass_json, read_call, read_whole
from .values import Arguments, Unknown, Unreported, ValueTags, accept_spaced, accepts, behind

_NAME = re.compile(r"[\w.:/-]*")


@dataclass(frozen=True)
class Keyed:
    """`suffix`: text before the `>` of each tag."""

    block: str = ""
    suffix: str = ""
    separator: str = ""
    unknown: Unknown = "json"
    undeclared: str = "call"
    """A call of an unknown tool becomes `call`, `text`, or `nothing`."""

    def tag(self, name: str) -> str:
        return f"<{name}{self.suffix}>"

    @property
    def calls(self) -> tuple[str, ...]:
        return (self.tag("tool_call"), *([self.tag(self.block)] if self.block else []))

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        opener, closer = self.tag("tool_call"), self.tag("/tool_call")
        block_end = self.tag("/" + self.block) if self.block else ""
        if self.block and (yield from reader.accept(self.tag(self.block))):
            yield from reader.space()
            if (yield from reader.at("{", "[")):
                yield from JsonBlock((), block_end, known=self.knows(tools)).between(reader)
                return
        if not (yield from reader.at(opener)):
            raise NotACall("a block without a call")
        while (yield from reader.accept(opener)):
            yield from reader.space()
            if (yield from reader.at("{", "[")):
                yield from JsonBlock((), closer, known=self.knows(tools)).between(reader)
            else:
                yield from self.call(reader, tools, closer)
            if not self.block:
                return
            yield from reader.space()
            if (yield from reader.accept(block_end)):
                return

    def knows(self, tools: Tools) -> Callable[[str], bool] | None:
        return None if self.undeclared == "call" else accepts(tools)

    def call(self, reader: TextReader, tools: Tools, closer: str) -> Reading[None]:
        name = yield from self.name(reader, closer)
        known = self.undeclared == "call" or accepts(tools)(name)
        report = reader if known else Unreported()
        arguments = Arguments(report, tools, name, unknown=self.unknown, lines=False)
        yield from claimed(self.arguments(reader, arguments, closer), through(closer))
        if not known and self.undeclared == "text":
            raise NotACall("no such tool", whole=True)

    def name(self, reader: TextReader, closer: str) -> Reading[str]:
        name = yield from reader.run(_NAME)
        yield from reader.space()
        following = yield from reader.peek()
        if not following:
            raise TextEnded
        if not name or following not in ("<", "{"):
            raise NotACall("not a name")
        if self.separator:
            yield from reader.accept(self.tag(self.separator))
        return name

    def arguments(self, reader: TextReader, arguments: Arguments, closer: str) -> Reading[None]:
        yield from reader.space()
        if (yield from reader.at("{")):
            arguments.begin()
            yield from read_json(reader, arguments.report.arguments)
            arguments.report.end_call()
            yield from reader.space()
            yield from reader.accept(closer)
            return
        while True:
            yield from reader.space()
            if (yield from reader.accept(closer)):
                arguments.end()
                return
            yield from self.parameter(reader, arguments, closer)

    def parameter(self, reader: TextReader, arguments: Arguments, closer: str) -> Reading[None]:
        yield from reader.expect(self.tag("arg_key"))
        key = (yield from reader.until(self.tag("/arg_key"))).strip()
        if key in arguments.keys:
            raise NotACall("twice the same parameter")
        yield from reader.expect(self.tag("/arg_key"))
        yield from reader.space()
        yield from reader.expect(self.tag("arg_value"))
        bracket = yield from behind(reader, "", "{", "[")
        arguments.open(key, bracket=bool(bracket))
        end, opener = self.tag("/arg_value"), self.tag("tool_call")
        if not arguments.is_text:
            arguments.piece((yield from pass_json(reader, end)))
        block_end = self.tag("/" + self.block) if self.block else ""
        value = self.tag("arg_value")
        values = ValueTags(value, end, self.tag("arg_key"), closer, block_end, self.calls)
        depth = 0
        while True:
            found = yield from reader.pass_until((end, opener, value), arguments.piece)
            if not found:
                raise TextEnded
            if found == opener:
                yield from self.quoted_call(reader, arguments, closer)
                continue
            if found == value:
                depth += 1
            elif (yield from values.closes(reader, depth, arguments.repeats)):
                break
            else:
                depth = max(0, depth - 1)
            arguments.piece(reader.skip(len(found)))
        arguments.close()

    def quoted_call(self, reader: TextReader, arguments: Arguments, closer: str) -> Reading[None]:
        """Pass a whole call inside a value as text; its closing tags do not close the value."""
        opener = self.tag("tool_call")
        mark = reader.mark()
        reader.skip(len(opener))
        yield from reader.run(_NAME)
        yield from reader.space()
        if self.separator:
            yield from reader.accept(self.tag(self.separator))
            yield from reader.space()
        found = yield from reader.at(self.tag("arg_key"))
        reader.rewind(mark)
        arguments.piece(reader.skip(len(opener)))
        if found:
            yield from reader.pass_until((closer,), arguments.piece)


OPENSOURCE = ":opensource"
"""Some published weights write it into every tag."""

GLM = Keyed()
POOLSIDE = Keyed(undeclared="nothing")
HY_V3 = Keyed("tool_calls", separator="tool_sep", unknown="string", undeclared="text")
HY_V3_OPEN = replace(HY_V3, suffix=OPENSOURCE)
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_PAIRS = TaggedArguments(
    "<arg_key>",
    "</arg_key>\n<arg_value>",
    "</arg_value>\n",
    untyped="json",
    barred=("<tool_call>",),
)
_WRITTEN = CallGrammar("<tool_call>{name}\n", "</tool_call>", between="\n", tagged=_PAIRS)


def _hy_v3(form: Keyed, **fields: object) -> ToolParser:
    """Reads both spellings of the tags, and writes that of `form`."""
    other = HY_V3 if form.suffix else HY_V3_OPEN
    block, call = form.tag("tool_calls"), form.tag("tool_call")
    inner = ("tool_sep", "/tool_call", "arg_key", "/arg_key", "arg_value", "/arg_value")
    key_end, value = form.tag("/arg_key"), form.tag("arg_value")
    pairs = TaggedArguments(
        form.tag("arg_key"), f"{key_end}\n{value}", form.tag("/arg_value") + "\n", barred=(call,)
    )
    return ToolParser(
        start=block,
        starts=(call, other.tag("tool_calls"), other.tag("tool_call")),
        end=form.tag("/tool_calls"),
        ends=(other.tag("/tool_calls"),),
        scan=scan_hy_v3,
        atomic=True,
        markers=tuple(each.tag(name) for each in (form, other) for name in inner),
        grammar=CallGrammar(
            f"{call}{{name}}{form.tag('tool_sep')}\n",
            form.tag("/tool_call") + "\n",
            f"{block}\n",
            form.tag("/tool_calls"),
            tagged=pairs,
        ),
        **fields,  # type: ignore[arg-type]
    )


def scan_hy_v3(reader: TextReader, tools: Tools) -> Reading[None]:
    opened = yield from reader.at(HY_V3_OPEN.tag("tool_calls"), HY_V3_OPEN.tag("tool_call"))
    form = HY_V3_OPEN if opened else HY_V3
    yield from form.scan(reader, tools)


PARSERS = (
    ToolParser(
        name="glm47",
        start="<tool_call>",
        end="</tool_call>",
        scan=GLM.scan,
        cut="drop",
        markers=_TAGS,
        detect=lambda template: "<arg_key>" in template,
        aliases=("glm", "glm4", "glm45", "glm46", "glm4_moe"),
        rank=3,
        grammar=_WRITTEN,
    ),
    ToolParser(
        name="poolside_v1",
        start="<tool_call>",
        end="</tool_call>",
        scan=POOLSIDE.scan,
        cut="drop",
        markers=_TAGS,
        detect=lambda template: "<arg_key>" in template and "poolside" in template.lower(),
        aliases=("poolside",),
        rank=4,
        grammar=_WRITTEN,
    ),
    _hy_v3(HY_V3, name="hy_v3", detect=lambda template: "<tool_sep" in template, rank=4),
    _hy_v3(
        HY_V3_OPEN,
        name="hy_v3_opensource",
        detect=lambda template: "<tool_sep" in template and OPENSOURCE in template,
        rank=5,
    ),
)


PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


def scan_apertus(reader: TextReader, tools: Tools) -> Reading[None]:
    """`<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>`."""
    yield from reader.expect(PREFIX)
    yield from reader.space()
    yield from reader.expect("[")
    before = reader.calls
    while True:
        yield from reader.space()
        yield from reader.accept(",")
        yield from reader.space()
        if (yield from reader.accept("]")):
            break
        yield from claimed(_named_call(reader), through(SUFFIX))
    if reader.calls == before:
        raise NotACall("an empty list")
    yield from accept_spaced(reader, SUFFIX)


def _named_call(reader: TextReader) -> Reading[None]:
    """`{"NAME": {...}}`."""
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.at('"')) != '"':
        raise NotACall("a call is a name and its arguments")
    name = json.loads((yield from read_whole(reader)))
    yield from reader.space()
    yield from reader.expect(":")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.expect("}")


APERTUS_PARSERS = (
    ToolParser(
        name="apertus",
        start=PREFIX,
        end=SUFFIX,
        scan=scan_apertus,
        detect=lambda template: PREFIX in template,
        aliases=("apertus2509",),
        rank=3,
        grammar=CallGrammar('{"{name}": ', "}", f"{PREFIX}[", f"]{SUFFIX}", between=", "),
    ),
)
