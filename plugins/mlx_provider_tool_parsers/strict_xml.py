"""Formats that are read as a whole tree: MiniCPM 5, MiniMax M3."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_provider import ToolCall, ToolParser
from mlx_provider.records import Tools

from .schema import as_json, functions, properties, schema_types, types

_FUNCTION = re.compile(r"""\s*(["'])(?P<name>[^"']+)\1\s*>(?P<body>.*)""", re.DOTALL)
_PARAMETER = re.compile(
    r"""\s*<param(?:eter)?\s+name\s*=\s*(["'])(?P<key>[^"']+)\1\s*>"""
    r"""(?:<!\[CDATA\[(?P<raw>.*?)\]\]>|(?P<text>[^<]*))</param(?:eter)?>\s*""",
    re.DOTALL,
)


def parse_minicpm(text: str, tools: Tools) -> list[ToolCall]:
    """`"NAME"><param name="KEY">value</param>`: well-formed XML for declared parameters only."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        raise ValueError("not a function element")
    name, body, known = match["name"].strip(), match["body"].strip(), functions(tools)
    if known and name not in known:
        raise ValueError("no such tool")
    found: dict[str, str] = {}
    at = 0
    while at < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            raise ValueError("not a parameter element")
        key = parameter["key"].strip()
        if key in found or (known and key not in properties(tools, name)):
            raise ValueError("no such parameter, or twice the same")
        raw = parameter["raw"]
        value = raw if raw is not None else html.unescape(parameter["text"])
        found[key] = as_json(value, types(tools, name, key), "json")
        at = parameter.end()
    return [ToolCall(name, _object(found.items()))]


def _object(items: Any) -> str:
    return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in items) + "}"


@dataclass
class _Node:
    tag: str
    text: str = ""
    children: list[_Node] = field(default_factory=list)


PREFIX = "]<]minimax[>["
_TAG = re.compile(r"<(/?)([^<>]+)>(.*)", re.DOTALL)


def _tree(text: str) -> _Node:
    root = _Node("")
    open_nodes = [root]
    for part in text.split(PREFIX)[1:]:
        match = _TAG.fullmatch(part)
        if match is None:
            raise ValueError("not a tag")
        closing, tag, rest = match.groups()
        if not closing:
            node = _Node(tag, rest)
            open_nodes[-1].children.append(node)
            open_nodes.append(node)
        elif len(open_nodes) < 2 or open_nodes[-1].tag.split()[0] != tag.strip():
            raise ValueError("tags do not match")
        else:
            open_nodes.pop()
    if len(open_nodes) > 1:
        raise ValueError("a tag is not closed")
    return root


def parse_minimax_m3(text: str, tools: Tools) -> list[ToolCall]:
    """Nested elements, each tag after a prefix that no text contains."""
    calls = []
    for node in _tree(text).children:
        match = re.fullmatch(r"""invoke\s+name=["']?([^"']+)["']?\s*""", node.tag)
        if match is None:
            raise ValueError("not an invocation")
        schema = functions(tools).get(match[1], {}).get("parameters")
        calls.append(ToolCall(match[1], _members(node, schema or {})))
    if not calls:
        raise ValueError("no invocation")
    return calls


def _members(node: _Node, schema: Any) -> str:
    known = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    other = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    grouped: dict[str, list[str]] = {}
    for child in node.children:
        inner = known.get(child.tag, other if isinstance(other, Mapping) else {})
        grouped.setdefault(child.tag, []).append(_json(child, inner))
    return _object((k, v[0] if len(v) == 1 else _list(v)) for k, v in grouped.items())


def _list(items: Sequence[str]) -> str:
    return "[" + ", ".join(items) + "]"


def _json(node: _Node, schema: Any) -> str:
    wanted = schema_types(schema)
    if not node.children:
        if not node.text.strip() and wanted and "string" not in wanted:
            return {"array": "[]", "object": "{}"}.get(min(wanted), "null")
        return as_json(node.text, wanted, "string")
    if "array" in wanted or {child.tag for child in node.children} == {"item"}:
        items = schema.get("items", {}) if isinstance(schema, Mapping) else {}
        return _list([_json(child, items) for child in node.children])
    return _members(node, schema)


def parsers() -> tuple[ToolParser, ...]:
    """Every format of this module."""
    return (
        ToolParser(
            name="minicpm5",
            start="<function name=",
            end="</function>",
            parse=parse_minicpm,
            detect=lambda template: "<function name=" in template and "<param name=" in template,
            aliases=("minicpm",),
            rank=3,
        ),
        ToolParser(
            name="minimax_m3",
            start=PREFIX + "<tool_call>",
            end=PREFIX + "</tool_call>",
            parse=parse_minimax_m3,
            detect=lambda template: PREFIX in template,
            markers=(PREFIX,),
            rank=4,
        ),
    )
