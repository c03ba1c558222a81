"""MiniMax M3: a tree of elements, each tag after a prefix that no text contains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
"""White space is no name."""


@dataclass
class _Node:
    tag: str
    begin: int
    """Of the text inside."""
    inside: str = ""
    """Everything between its tags, as written."""
    children: list[_Node] = field(default_factory=list)


def _tree(text: str) -> _Node:
    root = _Node("", 0)
    open_nodes, tags = [root], list(_TAG.finditer(text))
    if len(tags) != text.count(PREFIX):
        raise ValueError("not a tag")
    for match in tags:
        closing, tag = match.groups()
        if not closing:
            node = _Node(tag, match.end())
            open_nodes[-1].children.append(node)
            open_nodes.append(node)
        elif len(open_nodes) < 2 or open_nodes[-1].tag.split()[0] != tag.strip():
            raise ValueError("tags do not match")
        else:
            node = open_nodes.pop()
            node.inside = text[node.begin : match.start()]
    if len(open_nodes) > 1:
        raise ValueError("a tag is not closed")
    return root


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
    (node,) = _tree(f"{CALL}{text}{CALL_END}").children
    match = re.fullmatch(r"""invoke\s+name=["']?([^"']+)["']?\s*""", node.tag)
    if match is None:
        raise ValueError("not an invocation")
    schema = functions(tools).get(match[1], {}).get("parameters")
    root = schema if isinstance(schema, Mapping) else {}
    return [ToolCall(match[1], _members(node, root, root))]


def _members(node: _Node, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    known = listed_parameters(schema)[0]
    other = schema.get("additionalProperties")
    grouped: dict[str, list[str]] = {}
    for child in node.children:
        inner = known.get(child.tag, other if isinstance(other, Mapping) else {})
        grouped.setdefault(child.tag, []).append(_json(child, inner, root))
    members = ((key, v[0] if len(v) == 1 else _list(v)) for key, v in grouped.items())
    return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in members) + "}"


def _list(items: Sequence[str]) -> str:
    return "[" + ", ".join(items) + "]"


def _json(node: _Node, inner: Any, root: Mapping[str, Any]) -> str:
    wanted, schema = value_types(inner, root), resolved(inner, root)
    if wanted == {"string"}:
        return json.dumps(node.inside, ensure_ascii=False)
    if not node.children:
        if not node.inside.strip() and wanted and "string" not in wanted:
            return {"array": "[]", "object": "{}"}.get(min(wanted), "null")
        return as_json(node.inside, wanted, "string", listed_values(inner, root) or ())
    if "array" in wanted or {child.tag for child in node.children} == {"item"}:
        items = schema.get("items", {})
        return _list([_json(child, items, root) for child in node.children])
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
