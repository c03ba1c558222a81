"""Reads any format, detected from the text: for models whose template has no known format."""

from __future__ import annotations

from collections.abc import Callable

from mlx_provider import ToolParser
from mlx_provider.records import Reading, TextReader, Tools

from . import gemma, invoke_tags, json_blocks, keyed, pythonic, sections
from .blocks import JsonBlock
from .calling_text import OPENER as CALLING
from .calling_text import scan_calling
from .function_tags import QWEN3_CODER
from .lookahead import behind
from .pythonic import scan_list

_JSON = JsonBlock(openers=("<tool_call>", "<|tool_call|>", "[", "{"), end="</tool_call>")


Scan = Callable[[TextReader, Tools], Reading[None]]


def _others() -> dict[str, Scan]:
    taken = ("<tool_call>", "<function=", "<|tool_call|>", "[", "{", "<tool_calls>", "```json")
    found: dict[str, Scan] = {}
    for module in (invoke_tags, sections, gemma, json_blocks):
        for parser in module.PARSERS:
            for opener in parser.openers():
                if opener not in taken and parser.scan is not None:
                    found.setdefault(opener, parser.scan)
    return found


_OTHERS = _others()


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    found = yield from reader.at(*_OTHERS, *_SHARED)
    if found in _OTHERS:
        yield from _OTHERS[found](reader, tools)
    elif found == "<function=":
        yield from QWEN3_CODER.scan(reader, tools)
    elif found == CALLING:
        yield from scan_calling(reader)
    elif found == "[":
        yield from _list(reader, tools)
    elif found in ("<tool_call>", "<|tool_call|>"):
        yield from _tool_call(reader, tools, found)
    else:
        yield from _JSON.scan(reader, tools)


def _tool_call(reader: TextReader, tools: Tools, opener: str) -> Reading[None]:
    """JSON, tags or keys: all three have the same markers."""
    following = yield from behind(reader, opener, "{", "[", "<")
    if following in ("{", "[") or opener != "<tool_call>":
        yield from _JSON.scan(reader, tools)
    elif following == "<":
        yield from QWEN3_CODER.scan(reader, tools)
    else:
        yield from keyed.GLM.scan(reader, tools)


def _list(reader: TextReader, tools: Tools) -> Reading[None]:
    scan_one = _JSON.scan if (yield from behind(reader, "[", "{")) else scan_list
    yield from scan_one(reader, tools)


_SHARED = ("<tool_call>", "<|tool_call|>", "<function=", CALLING, "[", "{")


def _markers() -> tuple[str, ...]:
    modules = (invoke_tags, sections, gemma, json_blocks, keyed, pythonic)
    found = (marker for module in modules for p in module.PARSERS for marker in p.visible())
    return tuple(dict.fromkeys(found))


PARSERS = (
    ToolParser(
        name="auto",
        start="<tool_call>",
        starts=tuple(x for x in (*_SHARED, *_OTHERS) if x not in ("<tool_call>", "{")),
        first=("{",),
        end="</tool_call>",
        scan=scan,
        markers=_markers(),
        aliases=("generic",),
        grammar=json_blocks.HERMES.grammar,
        fallback="read",
    ),
)
