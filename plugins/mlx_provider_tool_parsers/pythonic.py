"""Calls written as Python calls: Llama 4, LFM2, Olmo 3."""

import ast
import json
import math
import re
import sys
from functools import partial
from typing import Any

from mlx_provider import CallGrammar, TaggedArguments, ToolCall, ToolParser
from mlx_provider.records import (
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claim,
    report_call,
    show_through,
)

from .json_blocks import CALLING, scan_calling
from .json_text import Brackets, JsonBlock, identity

_HEAD = re.compile(r"[\w.]*")
_STRING = re.compile(r"(['\"])(?:\\.|(?!\1)[^\\])*(?:\1|(\\?\Z))", re.DOTALL)
_ESCAPE = re.compile(r"\\.|\n", re.DOTALL)
_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n")
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parse_call(text: str) -> ToolCall:
    """The call in Python source such as `f(a=1)` or `f({"a": 1})`. Raises `ValueError`."""
    try:
        node = ast.parse(_one_line_strings(text), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not Python") from error
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if node.args:
        only = _value(node.args[0])
        if len(node.args) > 1 or arguments or not isinstance(only, dict):
            raise ValueError("positional arguments have no names")
        arguments = only
    if None in arguments:
        raise ValueError("a double-starred argument has no name")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("not a function's name")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class _JsonConstants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        # a large number such as 1e999 is valid JSON, but infinity is not
        return ast.Constant(sys.float_info.max) if node.value == math.inf else node


def _value(node: ast.expr) -> Any:
    """The value of a literal that JSON can write. Raises `ValueError`."""
    try:
        value = ast.literal_eval(_JsonConstants().visit(node))
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("not a literal") from error
    return value


def _one_line_strings(text: str) -> str:
    """Escape line ends in strings: models write them raw, and Python refuses them. Double the
    backslash of an unknown escape, which gives the same text without a warning of Python."""

    def escape(found: re.Match[str]) -> str:
        if found[0] == "\n":
            return "\\n"
        return found[0] if found[0][1:] in _ESCAPES else f"\\{found[0]}"

    def escape_string(found: re.Match[str]) -> str:
        is_open = found[2] is not None  # the text ends in it
        return found[0] if is_open else _ESCAPE.sub(escape, found[0])

    return _STRING.sub(escape_string, text)


def read_calls(reader: TextReader, stop: str, *, listed: bool) -> Reading[None]:
    """Read calls up to `stop`, which stays unread. Each one is reported when it ends. `listed`:
    commas must separate them. Raises `NotACall`."""
    while not (yield from reader.at(stop)):
        head = yield from reader.run(_HEAD)
        if not head or head[0].isdigit() or (yield from reader.peek()) != "(":
            raise NotACall("not a call")
        brackets, parts = Brackets(quotes="'\"", brackets="()[]{}"), [head]
        if not (yield from brackets.read(reader, parts.append)):
            raise TextEnded
        try:
            call = parse_call("".join(parts))
        except ValueError as error:
            raise NotACall(str(error), whole=True) from error
        if listed:
            yield from reader.space()
            if not (yield from reader.at(",", stop)):
                raise NotACall("no comma after a call", whole=True)
        report_call(reader, call)
        yield from reader.accept(",")
        yield from reader.space()


def scan_list(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read `[f(a=1), g()]`, with or without Llama 4's markers around it. Raises `NotACall`."""
    before = reader.calls_begun
    yield from reader.accept("<|python_start|>")
    yield from reader.space()
    yield from reader.expect("[")
    yield from reader.space()
    yield from read_calls(reader, "]", listed=True)
    if reader.calls_begun == before:
        raise NotACall("an empty list")
    yield from reader.expect("]")
    yield from reader.accept("<|python_end|>")


def scan_lfm2(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read calls between markers, a list without markers, or `[Calling tool: NAME({...})]`."""
    found = yield from reader.at("<|tool_call_start|>", CALLING, "[")
    if found == CALLING:
        yield from scan_calling(reader)
    elif found == "[":
        yield from scan_list(reader, tools)
    else:
        yield from _between(reader, tools, "<|tool_call_start|>", "<|tool_call_end|>")


def _between(reader: TextReader, tools: Tools, start: str, end: str) -> Reading[None]:
    """Read Python calls or JSON calls between two markers. Markers inside strings are text."""
    mark = reader.mark()
    yield from reader.expect(start)
    yield from reader.space()
    listed = bool((yield from reader.accept("[")))
    yield from reader.space()
    if (yield from reader.at("{")):
        reader.rewind(mark)
        yield from JsonBlock((start,), end).scan(reader, tools)
        return
    reader.drop_mark()
    first_call = reader.mark()
    head = yield from reader.run(_HEAD)
    is_call = head and (yield from reader.at("("))
    reader.rewind(first_call)
    calls = read_calls(reader, "]" if listed else end, listed=listed)
    yield from claim(calls, show_through(end)) if is_call else calls
    yield from reader.accept("]")
    yield from reader.space()
    yield from reader.accept(end)


def _make_grammar(start: str, end: str, between: str = ", ") -> CallGrammar:
    keywords = TaggedArguments("", "=", "", between=", ", quotes=None, keywords=True)
    return CallGrammar("{name}(", ")", start, end, between, keywords)


PARSERS = (
    ToolParser(
        start="<|python_start|>",
        first=("[",),
        end="<|python_end|>",
        scan=scan_list,
        grammar=_make_grammar("[", "]"),
        **identity("llama4_pythonic", ("<|python_start|>",), aliases="pythonic llama4", rank=3),
    ),
    ToolParser(
        start="<|tool_call_start|>",
        starts=(CALLING,),
        first=("[",),
        end="<|tool_call_end|>",
        scan=scan_lfm2,
        grammar=_make_grammar("<|tool_call_start|>[", "]<|tool_call_end|>"),
        **identity("lfm2", ("<|tool_call_start|>",), rank=3),
    ),
    ToolParser(
        start="<function_calls>",
        end="</function_calls>",
        scan=partial(_between, start="<function_calls>", end="</function_calls>"),
        grammar=_make_grammar("<function_calls>", "</function_calls>", between="\n"),
        **identity("olmo3", ("<function_calls>",)),
    ),
)
