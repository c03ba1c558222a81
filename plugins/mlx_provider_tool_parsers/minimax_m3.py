"""MiniMax M3: a tree of elements, each tag after a prefix that no text contains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mlx_provider import CallGrammar, TaggedArguments, ToolCall, ToolParser
from mlx_provider.records import (
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claimed,
    listed_parameters,
    listed_values,
    read_marked,
    resolved,
    through,
    value_types,
)

from .json_text import ignore
from .values import as_json, behind, functions

PREFIX = "]<]minimax[>["
OPEN, CLOSE = PREFIX + "<tool_call>", PREFIX + "</tool_call>"
CALL, CALL_END = PREFIX + "<invoke", PREFIX + "</invoke>"
_TAG = re.compile(re.escape(PREFIX) + r"<(/?)(?!\s*>)([^<>]+)>")
"""The lookahead rejects a tag whose name is only white space."""


class _Node(NamedTuple):
    tag: str
    inside: str
    """Everything between its tags, as written."""
    children: list[_Node]


def _node(text: str, tags: Iterator[re.Match[str]], opening: re.Match[str]) -> _Node:
    children: list[_Node] = []
    for match in tags:
        if not match[1]:
            children.append(_node(text, tags, match))
        elif match[2].strip() == opening[2].split()[0]:
            return _Node(opening[2], text[opening.end() : match.start()], children)
        else:
            break
    raise ValueError("a tag is not closed")


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """Text between invocations is dropped."""
    begun = yield from behind(reader, OPEN, CALL)
    reading = _block(reader, tools)
    yield from claimed(reading, through(CLOSE)) if begun else reading


def _block(reader: TextReader, tools: Tools) -> Reading[None]:
    before = reader.calls
    yield from reader.expect(OPEN)
    while (found := (yield from reader.pass_until((CALL, CLOSE), ignore))) == CALL:
        yield from read_marked(reader, (CALL,), CALL_END, parse, tools)
    if not found:
        raise TextEnded
    if reader.calls == before:
        raise NotACall("no invocation")
    reader.skip(len(found))


def parse(text: str, tools: Tools) -> list[ToolCall]:
    """Raises `ValueError`."""
    whole = f"{CALL}{text}{CALL_END}"
    first, *rest = _TAG.finditer(whole)
    tags = iter(rest)
    node = _node(whole, tags, first)
    match = re.fullmatch(r"""invoke\s+name=["']?([^"']+)["']?\s*""", node.tag)
    if match is None or next(tags, None) or len(rest) + 1 != whole.count(PREFIX):
        raise ValueError("not an invocation")
    schema = functions(tools).get(match[1], {}).get("parameters")
    root = schema if isinstance(schema, Mapping) else {}
    return [ToolCall(match[1], _members(node, root, root))]


def _members(node: _Node, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    known, other = listed_parameters(schema)[0], schema.get("additionalProperties")
    grouped: dict[str, list[str]] = {}
    for child in node.children:
        inner = known.get(child.tag, other if isinstance(other, Mapping) else {})
        grouped.setdefault(child.tag, []).append(_json(child, inner, root))
    members = (f"{json.dumps(k, ensure_ascii=False)}: {_list(v)}" for k, v in grouped.items())
    return "{" + ", ".join(members) + "}"


def _list(items: list[str], least: int = 2) -> str:
    """A JSON array, or with fewer than `least` items the only item: a lone tag is its value."""
    return "[" + ", ".join(items) + "]" if len(items) >= least else items[0]


def _json(node: _Node, inner: Any, root: Mapping[str, Any]) -> str:
    wanted, schema = value_types(inner, root), resolved(inner, root)
    if wanted == {"string"}:
        return json.dumps(node.inside, ensure_ascii=False)
    if not node.children:
        if not node.inside.strip() and wanted and "string" not in wanted:
            return {"array": "[]", "object": "{}"}.get(min(wanted), "null")
        return as_json(node.inside, wanted, "string", listed_values(inner, root) or ())
    if "array" in wanted or {child.tag for child in node.children} == {"item"}:
        return _list([_json(x, schema.get("items", {}), root) for x in node.children], least=1)
    return _members(node, schema, root)


PARSERS = (
    ToolParser(
        name="minimax_m3",
        start=OPEN,
        end=CLOSE,
        scan=scan,
        detect=lambda template: PREFIX in template,
        markers=(PREFIX,),
        rank=4,
        grammar=CallGrammar(
            f'{CALL} name="{{name}}">',
            CALL_END,
            OPEN,
            CLOSE,
            tagged=TaggedArguments(f"{PREFIX}<", ">", f"{PREFIX}</{{key}}>", barred=(PREFIX,)),
        ),
    ),
)
