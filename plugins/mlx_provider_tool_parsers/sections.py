"""Calls as `NAME marker {json}` inside a section: DeepSeek V3 and V3.1, Mistral, and Kimi K2. In
place of the name, Kimi K2 writes an id such as `functions.NAME:INDEX`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mlx_provider import CallGrammar, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claim, show_through

from .json_text import JsonBlock, identity, ignore, read_call
from .values import behind, functions

_NAME = re.compile(r"[\w.:/-]+")
_NAME_CHARACTERS = re.compile(r"[\w.:/-]*")


def plain_name(text: str, tools: Tools) -> str:
    """`text` without the white space around it. Raises `NotACall` if it is no name."""
    name = text.strip()
    if not _NAME.fullmatch(name):
        raise NotACall("not a name")
    return name


_INDEX = re.compile(r":[^:]*$")
_COUNTER = re.compile(r"[_.-]?\d+$")
_OPAQUE = re.compile(
    r"(?:call|toolu|fc|tool|tool_call|chatcmpl)[-_][\w-]*|functions|\d*|(?=.*\d)[\da-f-]{8,}"
)
"""Ids that other models' servers make. They contain no name."""


def kimi_name(text: str, tools: Tools) -> str:
    """The name in an id, preferably a declared one. Raises `NotACall` if there is none."""
    whole = text.strip()
    if not _NAME_CHARACTERS.fullmatch(whole):
        raise NotACall("not an id")
    name = _INDEX.sub("", whole).removeprefix("functions.").removeprefix("functions:")
    last = name.rpartition(".")[2]
    known = functions(tools)
    for candidate in (whole, name, last, _COUNTER.sub("", name), _COUNTER.sub("", last)):
        if candidate in known:
            return candidate
    if _OPAQUE.fullmatch(name):
        raise NotACall("an id without a name")
    return name


@dataclass(frozen=True)
class Section:
    """One of `begin`, calls `call [kind separator] NAME separator {json} call_end`, one of `end`.
    If there is a `fence`, its texts stand around the JSON, without a `separator` before it."""

    begin: tuple[str, ...]
    call: str
    separator: str
    call_end: str
    end: tuple[str, ...]
    kind: str = ""
    fence: tuple[str, str] = ("", "")
    name: Callable[[str, Tools], str] = plain_name
    """(`NAME` as the model wrote it, tools) -> the tool's name. Raises `NotACall`."""

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read one section. Text between its calls is dropped. Raises `NotACall`."""
        yield from reader.accept(*self.begin)
        before = reader.calls_begun
        while True:
            found = yield from reader.pass_until((self.call, *self.end, *self.begin), ignore)
            if found != self.call:
                reader.skip(len(found) if found in self.end else 0)
                break
            reader.skip(len(found))
            yield from self.one(reader, tools)
        if reader.calls_begun == before:
            raise NotACall("a section without a call")

    def one(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read one call, from the text after `call` up to `call_end`, which may be missing."""
        if self.kind:
            yield from reader.space()
            yield from reader.expect(self.kind)
            yield from reader.expect(self.separator)
        stops = (self.fence[0] or self.separator, self.call_end, *self.end, self.call)
        name = self.name((yield from reader.until(*stops)), tools)
        yield from reader.expect(stops[0])
        then = show_through(*self.end)  # after a fault in the JSON, up to the section's end
        yield from claim(read_call(reader, name, then), then)
        yield from reader.space()
        if self.fence[1]:
            yield from reader.accept(self.fence[1])
            yield from reader.space()
        yield from reader.accept(self.call_end)


DEEPSEEK_V31 = Section(
    begin=("<｜tool▁calls▁begin｜>",),
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    end=("<｜tool▁calls▁end｜>",),
)
DEEPSEEK_V3 = replace(DEEPSEEK_V31, kind="function", fence=("\n```json\n", "```"))
KIMI_K2 = Section(
    begin=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    name=kimi_name,
)
_MISTRAL_LIST = JsonBlock(openers=("[TOOL_CALLS]",), ids=True)


def scan_mistral(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read `[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{...}`, or the JSON list of older models."""
    if (yield from behind(reader, "[TOOL_CALLS]", "[", "{")):
        yield from _MISTRAL_LIST.scan(reader, tools)
        return
    yield from reader.accept("[TOOL_CALLS]")
    yield from reader.space()
    name = yield from reader.run(_NAME_CHARACTERS)
    if not name and not (yield from reader.peek()):
        return  # a marker at the end of the reply is dropped
    yield from reader.space()
    call_id = ""
    if (yield from reader.accept("[CALL_ID]")):
        call_id = yield from reader.run(_NAME_CHARACTERS)
    yield from reader.accept("[ARGS]")
    yield from read_call(reader, name, call_id=call_id)


def _make_parser(
    section: Section, head: str, tail: str = "", between: str = "", **fields: Any
) -> ToolParser:
    """`head`, `tail`: texts before and after the arguments, within the markers of a call."""
    begin, end = section.begin[0], section.end[0]
    before, after = section.call + head, tail + section.call_end
    separators = (section.kind + section.separator, section.separator)
    return ToolParser(
        start=begin,
        starts=section.begin[1:],
        end=end,
        ends=section.end[1:],
        scan=section.scan,
        markers=(section.call, *separators, section.call_end),
        grammar=CallGrammar(before, after, begin, end, between),
        **fields,
    )


_LIST = CallGrammar.json_list("[TOOL_CALLS]", "")
_ID_KEY = re.compile(r"[\"']id[\"']\s*:")
_MISTRAL = ToolParser(
    start="[TOOL_CALLS]",
    end="",
    scan=scan_mistral,
    markers=("[ARGS]", "[CALL_ID]"),
    grammar=_LIST,
    **identity("mistral", ("[TOOL_CALLS]",), aliases="magistral"),
)


def _shows_ids(template: str) -> bool:
    listed = "[TOOL_CALLS]" in template and "[ARGS]" not in template
    return listed and bool(_ID_KEY.search(template))


PARSERS = (
    _make_parser(
        DEEPSEEK_V3,
        head="function<｜tool▁sep｜>{name}\n```json\n",
        tail="\n```",
        between="\n",
        **identity(
            "deepseek_v3",
            ("<｜tool▁sep｜>", "```json"),
            aliases="deepseek_r1 deepseek_r1_0528 deepseek",
            rank=3,
        ),
    ),
    _make_parser(
        DEEPSEEK_V31,
        head="{name}<｜tool▁sep｜>",
        after="drop",
        **identity("deepseek_v31", ("<｜tool▁sep｜>",)),
    ),
    _make_parser(
        KIMI_K2,
        head="functions.{name}:{digits}<|tool_call_argument_begin|>",
        after="drop",
        **identity("kimi_k2", ("<|tool_calls_section_begin|>",), aliases="kimi moonshot", rank=3),
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        grammar=CallGrammar("[TOOL_CALLS]{name}[ARGS]", ""),
        **identity("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), aliases="devstral", rank=3),
    ),
    replace(
        _MISTRAL,
        detect=_shows_ids,
        grammar=replace(_LIST, after=', "id": "{id}"}'),
        **identity("mistral_ids", rank=3),
    ),
    replace(
        _MISTRAL,
        grammar=CallGrammar("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]", ""),
        **identity("mistral_call_id", ("[TOOL_CALLS]", "[CALL_ID]"), rank=4),
    ),
)
