"""Tools, arguments and misleading text, for calls that are written and read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from ...chat.constraints.readable import framed
from ...chat.output.whole_reply import read_chunks
from ...records import ReasoningParser, ToolParser, value_types

KIDS: dict[str, Any] = {"type": "object", "properties": {"kids": {"type": "array"}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Text": {"type": "string"}, "Count": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "note": {"$ref": "#/$defs/Text"},
        "both": {"allOf": [{"type": "string"}]},
        "count": {"$ref": "#/$defs/Count"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "tree": KIDS,
        "maybe": {"type": ["string", "null"]},
        "mode": {"enum": ["all", "first", None]},
        "pick": {"enum": [1, 2, "3"]},
        "few": {"items": {"type": "integer"}},
        "free": {"description": "any value"},
    },
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "put", "parameters": SCHEMA}}
ODD = (
    *("a", "Ж", "本", "😀", " ", "\n", "\n\n", "\t", "\r", "\u2028"),
    *('"', "'", "\\", "\\n", "/", "`"),
    *("<", ">", "{", "}", "[", "]", "(", ")", ",", ":", "&amp;", "null", "7", "true", "```json\n"),
    *("<![CDATA[", "]]>", "<|im_end|>", "</s>", "<think>", "</think>", "[Calling tool: put({})]"),
)
PLAIN = {
    "text": 'two\nlines, <b>"quoted"</b> \\ [x] {y}',
    "note": "7",
    "both": "null",
    "count": -3,
    "share": 0.5,
    "flag": True,
    "list": [1, "a", [None]],
    "tree": {"kids": [{"a": "b"}]},
    "maybe": None,
    "mode": "first",
    "pick": "3",
    "few": [1, 2],
    "free": {"a": [1, {"b": None}]},
}
"""Arguments that are unambiguous in every format."""

TREE: dict[str, Any] = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "kind": {"anyOf": [{"const": "dir"}, {"const": "file"}, {"type": "null"}]},
                "size": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 1},
            },
            "required": ["kind", "size", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/Node",
}
GREP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "grep",
        "parameters": {
            "type": "object",
            "properties": {
                "pattern": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
                "count": {"type": "integer", "minimum": 0, "maximum": 99},
                "mode": {"enum": ["all", "first"]},
            },
            "required": ["pattern", "mode"],
        },
    },
}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}
PUT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "put",
        "parameters": {
            "type": "object",
            "properties": {
                "root": {"$ref": "#/$defs/Node"},
                "kind": {"anyOf": [{"const": "dir"}, {"const": "file"}]},
                "count": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
                "share": {"type": "number", "minimum": 0, "maximum": 1},
                "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["root", "kind", "count"],
            "$defs": TREE["$defs"],
        },
    },
}
MOVE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {
                "from": {"type": "string", "maxLength": 3},
                "to": {"type": "object", "properties": {"id": {"type": "string", "maxLength": 3}}},
                "how": {"enum": ["fast", 2, None]},
            },
        },
    },
}
"""All parameters are optional, and one key is a Python keyword."""
TOOLS: Sequence[dict[str, Any]] = (GREP, PING, PUT, MOVE)
"""With references, enumerations, bounds, patterns, and a tool without parameters."""


def pieces(parser: ToolParser) -> list[str]:
    grammar = parser.call_grammar()
    before, after = framed(grammar, 1, "abcDEF123", "put")
    found = [*parser.visible(), grammar.open, grammar.close, after, before]
    if (tags := grammar.tagged) is not None:
        key = f"{tags.key_before}note{tags.key_after}"
        closed = tags.value_after.replace("{key}", "text")
        found += [key, f"\n{key}", before + key, closed, closed.strip(), *tags.barred, tags.between]
        found += [f"{closed.strip()} {key}", f"{closed.strip()}{after}"]
    return [piece for piece in found if piece]


def texts(parser: ToolParser) -> st.SearchStrategy[str]:
    odd = st.lists(st.sampled_from([*ODD, *pieces(parser)]), max_size=6).map("".join)
    return odd | st.text(st.characters(codec="utf-8"), max_size=6)


def calls(parser: ToolParser, *, nested: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that fit SCHEMA, in its order. `nested`: lists and objects mislead, too."""
    text = texts(parser)
    inside = text if nested else st.text("ab</>", max_size=4)
    scalars = inside | st.integers() | st.booleans() | st.none()
    tree = st.recursive(
        scalars,
        lambda value: st.lists(value, max_size=2) | st.dictionaries(inside, value, max_size=2),
    )
    values: dict[str, st.SearchStrategy[Any]] = {
        "text": text,
        "note": text,
        "both": text,
        "count": st.integers(-(10**20), 10**20),
        "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "flag": st.booleans(),
        "list": st.lists(tree, max_size=3),
        "tree": st.fixed_dictionaries({}, optional={"kids": st.lists(tree, max_size=2)}),
        "maybe": st.none() | text,
        "mode": st.sampled_from(["all", "first", None]),
        "pick": st.sampled_from([1, 2, "3"]),
        "few": st.lists(st.integers(), max_size=3),
        "free": st.dictionaries(inside, scalars, max_size=2),
    }
    order = list(values)
    return st.fixed_dictionaries({}, optional=values).map(
        lambda found: {key: found[key] for key in order if key in found}
    )


def meant(parser: ToolParser, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: _meant(parser, key, value) for key, value in arguments.items()}


def _meant(parser: ToolParser, key: str, value: Any) -> Any:
    tags = parser.call_grammar().tagged
    if tags is None or tags.text is None or not isinstance(value, str):
        return value
    union = value_types(SCHEMA["properties"][key], SCHEMA) > {"string"}
    if union and not tags.tells_text and value.strip().lower() in ("null", "none"):
        return None
    return value


Called = tuple[str, Any]


def read(
    text: str, parser: ToolParser, tools: Sequence[Any], thoughts: ReasoningParser | None = None
) -> tuple[list[Called], str]:
    found = read_chunks([text], tools=tools, tool_parser=parser, reasoning_parser=thoughts)
    return [*found.whole_calls, *found.cut_calls], (found.content + found.reasoning).strip()


def named(name: str, keys: Sequence[str], kind: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key in keys}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WORD = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)
ODD_NAME = st.text(st.sampled_from("a-.:/ <>{}[]()\"'\\=,|&\n1Ж"), min_size=1, max_size=6)
VALUES: dict[str, Any] = {"string": "v", "integer": 1, "array": []}
